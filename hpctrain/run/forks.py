"""Forks of a rank, which are no ranks: the workers of data loaders and pools, or what a script forks by itself.

A fork has the rank's memory, its connections and its exit handlers, and none of its threads. What runs at its end would
write the rank's record, leave MPI in its place or wait for the other ranks, for ever. So a fork forgets what its parent
had registered for the exit, as those of :mod:`multiprocessing` do, and the operating system ends it. What it has begun
itself still comes to its end: its threads, queues and processes.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from hpctrain.errors import HpctrainError

_watching = _forked = False
_status = 0
_exit = sys.exit


def watch() -> None:
    """From now on, tell forks of this process from the process itself. Idempotent."""
    global _watching
    if not _watching:
        _watching = True
        os.register_at_fork(after_in_child=_begin_fork)


def is_fork() -> bool:
    """Whether this process was forked from one that watches."""
    return _forked


def require_rank(what: str) -> None:
    """Refuse what only the rank itself can do.

    Raises:
        HpctrainError: this process is a fork of it.
    """
    if _forked:
        raise HpctrainError(
            f"{what} was called in process {os.getpid()}, which was forked from a rank and is none itself",
            "call it in the rank, and send the result to its workers",
        )


def leave(status: int) -> None:
    """End a fork: its threads end, then its exit handlers run, as in Python. Does not return.

    What its parent has left in it is passed over.
    """
    global _status
    _status = status
    try:
        # What Python itself calls, and multiprocessing in its forks.
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException:  # a KeyboardInterrupt; no error may lead back into the rank's own work
        traceback.print_exc()
    atexit._run_exitfuncs()


def _end() -> NoReturn:
    status = _status
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            status = status or 120  # as Python does
    os._exit(status)


def exit_status(error: BaseException | None) -> int:
    """The exit status that Python gives a process that ends with this exception."""
    if isinstance(error, SystemExit):
        code = error.code
        return code & 0xFF if isinstance(code, int) else int(code is not None)
    return int(error is not None)


def _begin_fork() -> None:
    global _forked
    _forked = True
    atexit._clear()
    # Python does not tell exit handlers the status that they end with. One of a SystemExit that was raised without
    # sys.exit is not seen here, but by hpctrain.train.rank where that runs the script.
    atexit.register(_end)
    if "multiprocessing.util" in sys.modules:
        _keep_exit_of_multiprocessing()
    sys.exit = _note_and_exit
    sys.excepthook = _note_and_show(sys.excepthook)


def _keep_exit_of_multiprocessing() -> None:
    """Let queues of this fork be written to their end, and its processes be waited for.

    It was registered as the module was imported, in the parent, whose finalizers it passes over by their process; the
    parent's processes, as a loader's workers, it would end.
    """
    from multiprocessing import process, util

    process._children = set()  # type: ignore[attr-defined]
    atexit.register(util._exit_function)  # type: ignore[attr-defined]


def _note_and_exit(code: str | int | None = None, /) -> NoReturn:
    global _status
    _status = exit_status(SystemExit(code))
    _exit(code)


def _note_and_show(
    show: Callable[[type[BaseException], BaseException, TracebackType | None], object],
) -> Callable[[type[BaseException], BaseException, TracebackType | None], object]:
    def note_and_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _status
        _status = 1
        show(kind, error, trace)

    return note_and_show

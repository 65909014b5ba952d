"""Forks of a rank, which are no ranks: the workers of data loaders and pools, or what a script forks by itself.

A fork has the rank's memory, connections and exit handlers, but none of its threads. The exit handlers would write the
rank's record, leave MPI in its place or wait for the other ranks for ever. So a fork drops the exit handlers of its
parent, as forks of :mod:`multiprocessing` do, and ends by ``os._exit``. It still finishes what it has begun itself: its
threads, temporary folders and open files.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
import weakref
from types import FrameType
from typing import NoReturn

from hpctrain.common.errors import HpctrainError
from hpctrain.common.stderr import tell_error


class _Process:
    """This process: whether its forks are detected, whether it is one, and its exit status then.

    The ``frames`` are those that a fork returns through, which keep their variables.
    """

    watching = forked = False
    status = 0
    frames: FrameType | None = None


_process = _Process()
# The base class of all files. io.IOBase is an abstract base class, whose issubclass() runs code of every type.
_FILE: type = io.IOBase.__bases__[0]


def watch() -> None:
    """Detect forks of this process from now on. Idempotent."""
    if not _process.watching:
        _process.watching = True
        os.register_at_fork(before=flush_streams, after_in_child=_begin_fork)


def is_fork() -> bool:
    """Whether this process was forked from one that called :func:`watch`."""
    return _process.forked


def require_rank(what: str) -> None:
    """Refuse a call that only the rank itself may make; ``what`` names it."""
    if _process.forked:
        raise HpctrainError(
            "HT-call-in-child-process",
            "{call} was called in process {pid}, which was forked from a rank and is none itself",
            "call it in the rank, and send the result to its workers",
            call=what,
            pid=os.getpid(),
        )


def leave(status: int) -> None:
    """End a fork as Python does: wait for its threads, then run its own exit handlers. Does not return."""
    _process.status = status
    run_exit_handlers()


def run_exit_handlers() -> None:
    """Wait for this process's threads, then run its exit handlers, as Python does at the end of a program."""
    try:
        # Python itself calls this at its end, and multiprocessing in its forks.
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException as error:  # such as KeyboardInterrupt: none may return into the rank's own code
        tell_error(error)
    atexit._run_exitfuncs()


def _end() -> NoReturn:
    flushed = flush_streams()
    close_files()
    # Python does not pass the exit status to exit handlers. It keeps an exception that nobody caught, not a SystemExit.
    status = _process.status or int(hasattr(sys, "last_value"))
    os._exit(status if flushed or status else 120)  # as Python does


def flush_streams() -> bool:
    """Flush stdout and stderr; returns whether both could be flushed."""
    flushed = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, RuntimeError, ValueError):
            flushed = False
    return flushed


def close_files() -> None:
    """Flush and close the files of this process: os._exit skips their finalizers."""
    made = [each for each in gc.get_objects() if issubclass(type(each), _FILE)]
    # A file that writes into another comes first: TextIOWrapper, GzipFile, BufferedWriter, FileIO.
    for each in sorted(made, key=_depth):
        with contextlib.suppress(Exception):
            each.close()


def _depth(file: io.IOBase) -> tuple[bool, bool, bool]:
    kind = type(file)
    return issubclass(kind, io.RawIOBase), kind is not io.TextIOWrapper, kind.__module__ == _FILE.__module__


def exit_status(error: BaseException | None) -> int:
    """The exit status that Python gives a process that ends with this exception."""
    if isinstance(error, SystemExit):
        code = error.code
        return code & 0xFF if isinstance(code, int) else int(code is not None)
    return int(error is not None)


def _begin_fork() -> None:
    _process.forked, _process.status, _process.frames = True, 0, sys._getframe()
    atexit._clear()
    # The parent's objects must not be finalized here: removing a temporary folder, for one, is up to the parent.
    gc.freeze()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    atexit.register(_end)

"""Forks of a rank, which are no ranks: the workers of data loaders and pools, or what a script forks by itself.

A fork has the rank's memory, its connections and its exit handlers, and none of its threads. What runs at its end would
write the rank's record, leave MPI in its place or wait for the other ranks, for ever. So a fork forgets what its parent
had registered for the exit, as those of :mod:`multiprocessing` do, and the operating system ends it. What it has begun
itself still comes to its end: its threads, queues, processes, temporary folders and open files. What its parent had
not written yet is the parent's to write.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from types import FrameType, ModuleType, TracebackType
from typing import NoReturn

from hpctrain.common.errors import HpctrainError

_watching = _forked = False
_status = 0
_frames: FrameType | None = None
# Of all files; an abstract base class would ask each type.
_FILE: type = io.IOBase.__bases__[0]


def watch() -> None:
    """From now on, tell forks of this process from the process itself. Idempotent."""
    global _watching
    if not _watching:
        _watching = True
        os.register_at_fork(before=_flush_streams, after_in_child=_begin_fork)


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
    flushed = _flush_streams()
    _close_files()
    os._exit(_status if flushed or _status else 120)  # as Python does


def _flush_streams() -> bool:
    """Write what stdout and stderr hold, and return whether that could be done."""
    flushed = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, RuntimeError, ValueError):
            flushed = False
    return flushed


def _close_files() -> None:
    """Write what the files of this fork hold: its interpreter does not take them down."""
    made = [each for each in gc.get_objects() if issubclass(type(each), _FILE)]
    # What writes into another file comes before that: TextIOWrapper, GzipFile, BufferedWriter, FileIO.
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
    global _forked, _frames, _status
    _forked, _status = True, 0
    # With the variables of the functions that the fork returns through.
    _frames = sys._getframe()
    atexit._clear()
    # Its parent's objects stay as they are: their ends, as the removal of a temporary folder, are the parent's.
    gc.freeze()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    # Python does not tell exit handlers the status that they end with. One of a SystemExit that was raised without
    # sys.exit is not seen here, but by hpctrain.worker.train.rank where that runs the script.
    atexit.register(_end)
    if logging := sys.modules.get("logging"):
        _keep_exit_of_logging(logging)
    if "multiprocessing.util" in sys.modules:
        _keep_exit_of_multiprocessing()
    sys.exit = _exit
    sys.excepthook = _note_and_show(sys.excepthook)


def _keep_exit_of_logging(logging: ModuleType) -> None:
    """Let what this fork logs be written; the records that its parent holds back are not its own."""
    for reference in logging._handlerList:
        buffer = getattr(reference(), "buffer", None)
        if isinstance(buffer, list):
            buffer.clear()
    atexit.register(logging.shutdown)


def _keep_exit_of_multiprocessing() -> None:
    """Let queues of this fork be written to their end, and its processes be waited for.

    It was registered as the module was imported, in the parent, whose finalizers it passes over by their process; the
    parent's processes, as a loader's workers, it would end.
    """
    from multiprocessing import process, util

    process._children = set()  # type: ignore[attr-defined]
    atexit.register(util._exit_function)  # type: ignore[attr-defined]


class _Status:
    """Noted when its exception dies by the interpreter, under no frame; one that a script catches dies under some."""

    def __init__(self, status: int) -> None:
        self._status = status

    def __del__(self) -> None:
        global _status
        if sys._getframe().f_back is None:
            _status = self._status


def _exit(code: str | int | None = None, /) -> NoReturn:
    raise _with_status(SystemExit(code))


def _with_status(error: SystemExit) -> SystemExit:
    # No frame of the traceback may hold the exception, or it would live on.
    error.__dict__["status of the fork"] = _Status(exit_status(error))
    return error


def _note_and_show(
    show: Callable[[type[BaseException], BaseException, TracebackType | None], object],
) -> Callable[[type[BaseException], BaseException, TracebackType | None], object]:
    def note_and_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _status
        if not (trace and _runs(trace.tb_frame)):
            _status = 1
        show(kind, error, trace)

    return note_and_show


def _runs(wanted: FrameType) -> bool:
    """Whether this frame still runs, as where a script shows an error that it has caught."""
    frame: FrameType | None = sys._getframe()
    while frame and frame is not wanted:
        frame = frame.f_back
    return frame is not None

"""Describes where a rank is in its script, for messages about ranks that are in different places."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

OWN = "hpctrain."
_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})

# Where the script ended by sys.exit or an exception, as its file and line.
_left: list[str] = []

# Names for collectives that hpctrain starts by itself, by the function that starts them.
PURPOSES = {
    "hpctrain.worker.adapters.guard.Guard.check_last": "the last comparison of parameters, at the end of its script",
    "hpctrain.worker.adapters.guard.Guard.compare": "the comparison of the parameters",
    "hpctrain.worker.comm.base.Communicator.make_last_checks": "hpctrain's last checks, at the end of its script",
    "hpctrain.worker.comm._leave_run": "the end of the run, at the end of its script",
}


def script_place(operation: str = "") -> str:
    """Where this process is: in a call of the script's own, or in a call of hpctrain's at some line of the script.

    Args:
        operation: the collective of the control plane that the process is in.
    """
    own, line = _divide(sys._getframe(1))
    at = f" at {line}" if line else left_at()
    # The innermost frames are those of the control plane itself.
    callers = [name for name in own if not name.startswith("hpctrain.worker.comm.control.")]
    if not callers:
        return f"in comm.{operation}{at}"
    purpose = next((PURPOSES[name] for name in callers if name in PURPOSES), None) or _public(callers, operation)
    return f"in {purpose}{at}"


def note_exit(trace: TracebackType | None) -> None:
    """Note where the script ended by ``sys.exit`` or an exception: its innermost line in this traceback."""
    for frame, line in traceback.walk_tb(trace):
        file = frame.f_code.co_filename
        if is_of_script(file):
            _left[:] = [f"{_short(file)}:{line}"]


def left_at() -> str:
    """A clause that says where the script ended; "" if it reached its last line, or has not ended."""
    return f", which it left at {_left[0]}" if _left else ""


def is_of_script(file: str) -> bool:
    """Whether a file of code is the script's: neither this package's nor a library's."""
    return not file.startswith((_PACKAGE, *_LIBRARIES, "<frozen"))


def script_line() -> str:
    """The file and line of the script that the main thread executes, "" if there is none."""
    return _divide(sys._current_frames().get(threading.main_thread().ident or 0))[1]


def _public(callers: list[str], operation: str) -> str:
    """The name of the function of hpctrain that the script called, and the operation in it."""
    module, _, name = callers[-1].rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    offered = found is not None and getattr(sys.modules["hpctrain"], name, None) is found
    return f"ht.{name} ({operation})" if offered else f"{operation} of {callers[0].removeprefix(OWN)}"


def _divide(frame: FrameType | None) -> tuple[list[str], str]:
    """The functions of hpctrain above the script's innermost frame, and that frame's file and line."""
    own: list[str] = []
    for called in _frames(frame):
        file = called.f_code.co_filename
        if file.startswith(_PACKAGE):
            own.append(f"{called.f_globals.get('__name__')}.{called.f_code.co_qualname}")
        elif is_of_script(file):
            return own, f"{_short(file)}:{called.f_lineno}"
    return own, ""


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of a thread from the innermost outwards, followed by the main thread's if this is another one."""
    while frame:
        yield frame
        frame = frame.f_back
    if threading.current_thread() is not threading.main_thread():
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame:
            yield frame
            frame = frame.f_back


def _short(file: str) -> str:
    with contextlib.suppress(OSError, ValueError):  # elsewhere, or from a folder that the script has removed
        return str(Path(file).relative_to(Path.cwd()))
    return file

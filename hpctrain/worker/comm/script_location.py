"""Describes where a rank is in its script, for messages about ranks that are in different places."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

from hpctrain.common.errors import HpctrainError, abbreviated

# How many ranks a message names.
_NAMED = 8
_CALLS_HINT = (
    "give every rank the same number of batches, as ht.shard does, leave a loop over them on all ranks alike, and make "
    "collective calls (backward(), comm.barrier(), ht.should_stop(), ht.mean(), saving by all ranks, …) on all ranks "
    "in the same order and with arrays of one shape and type: not under `if comm.rank == 0:`"
)
# What computing with a batch is called, of which each rank holds some rows.
WHOLE_BATCH = "of a whole batch"
_WHOLE_BATCH_HINT = (
    "all ranks compute together what follows from a batch: take it out of the condition, such as `if comm.rank == 0:`, "
    "and leave there what prints or saves its numbers; only rank 0's output is shown anyway"
)
OWN = "hpctrain."
_CONTROL = "hpctrain.worker.comm.control."
# What hpctrain calls once the script has ended.
_LAST_CALLS = (".make_last_checks", "._leave_run")
_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})

# Where the script ended by sys.exit or an exception, as its file and line.
_left: list[str] = []


def mismatch_error(of_ranks: Iterable[tuple[str, str]]) -> HpctrainError:
    """The error for ranks whose messages met although they belong to different calls: each one's host and place."""
    places = {f"rank {rank} on {host}": place for rank, (host, place) in enumerate(of_ranks)}
    ranks_at: dict[str, list[str]] = {}
    for name, place in places.items():
        ranks_at.setdefault(place, []).append(name)
    return HpctrainError(
        "HT-ranks-in-different-calls",
        "the ranks are waiting for each other in different places, and would take each other's values: {where}",
        remedy(ranks_at),
        exit_code=1,
        where="; ".join(f"{abbreviated(ranks, _NAMED)} {place}" for place, ranks in ranks_at.items()),
        # Of the first ranks alone, as every rank is sent the error.
        places=dict(itertools.islice(places.items(), _NAMED)),
    )


def remedy(places: Iterable[str]) -> str:
    """What brings ranks together that are in these places."""
    return _WHOLE_BATCH_HINT if any(WHOLE_BATCH in place for place in places) else _CALLS_HINT


def script_place(operation: str) -> str:
    """Where this process is: in a collective of the control plane that the script calls, or hpctrain for it."""
    callers, line = _divide(sys._getframe(1))
    # The innermost frames are those of the control plane itself.
    callers = [name for name in callers if not name.startswith(_CONTROL)]
    call = _public(callers, operation) if callers else f"comm.{operation}"
    ended = _left or any(name.endswith(_LAST_CALLS) for name in callers)
    at_end = f" at the end of its script{left_at()}" if ended else ""
    return f"in {call}{f' at {line}' if line else at_end}"


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
    function = getattr(sys.modules.get(module), name, None)
    offered = function is not None and getattr(sys.modules["hpctrain"], name, None) is function
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
    main = threading.main_thread()
    beside = threading.current_thread() is not main
    for begin in (frame, sys._current_frames().get(main.ident or 0) if beside else None):
        inner = begin
        while inner:
            yield inner
            inner = inner.f_back


def _short(file: str) -> str:
    with contextlib.suppress(OSError, ValueError):  # elsewhere, or from a folder that the script has removed
        return str(Path(file).relative_to(Path.cwd()))
    return file

"""Describes where a rank is in its script, for messages about ranks that are in different places."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path

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
_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


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


def script_place(what: str, *, ended: bool, passes: int) -> str:
    """Where this rank is: in ``what``, at a line of its script or at its end, after so many backward passes."""
    if ended:
        at = " at the end of its script"
    else:
        line = script_line()
        at = f" at {line}" if line else ""
    # Those of DistributedDataParallel are not counted.
    after = f", after backward pass {passes}" if passes else ""
    return f"{what}{at}{after}"


def is_of_script(file: str) -> bool:
    """Whether a file of code is the script's: neither this package's nor a library's."""
    return not file.startswith((_PACKAGE, *_LIBRARIES, "<frozen"))


def script_line() -> str:
    """The file and line of the script that this thread executes, or else the main thread; "" if there is none."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    for frame, line in itertools.chain(traceback.walk_stack(sys._getframe(1)), traceback.walk_stack(main)):
        if is_of_script(frame.f_code.co_filename):
            return f"{_short(frame.f_code.co_filename)}:{line}"
    return ""


def _short(file: str) -> str:
    with contextlib.suppress(OSError, ValueError):  # elsewhere, or from a folder that the script has removed
        return str(Path(file).relative_to(Path.cwd()))
    return file

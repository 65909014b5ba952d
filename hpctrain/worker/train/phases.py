"""Rank 0 says what it does before the first step, which takes seconds, and minutes on a busy file system."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from hpctrain.worker.comm import Communicator

# A user who sees nothing for three seconds begins to wonder whether the run hangs.
_SECONDS = 2.0
# After a minute, a line every two seconds would only fill the log.
_PATIENT_AFTER = 60.0
_PATIENT_SECONDS = 10.0


@contextlib.contextmanager
def phase(comm: Communicator, doing: str, over: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Print on rank 0 what it is doing, and repeat it at intervals until the block ends.

    Args:
        doing: a participle, as in "loading PyTorch".
        over: whether the phase has ended although the block has not.
    """
    if comm.rank != 0:
        yield
        return
    print(f"hpctrain: {doing}", file=sys.stderr, flush=True)
    ended = threading.Event()
    threading.Thread(target=_repeat, args=(doing, ended, over), name="hpctrain-phase", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _repeat(doing: str, ended: threading.Event, over: Callable[[], bool]) -> None:
    begun = time.monotonic()
    seconds = 0.0
    while not ended.wait(_PATIENT_SECONDS if seconds > _PATIENT_AFTER else _SECONDS) and not over():
        seconds = time.monotonic() - begun
        # Not through sys.stderr, whose lock would stay taken for ever in a process forked at this moment. The main
        # thread reports a full disk.
        with contextlib.suppress(OSError):
            os.write(2, f"hpctrain: still {doing} ({seconds:.0f} s)\n".encode())

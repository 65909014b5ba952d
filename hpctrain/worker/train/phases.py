"""What rank 0 says on its way to the first step: that takes seconds anywhere, and minutes on a busy file system."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from hpctrain.worker.comm import Communicator

# Whoever sees nothing for three seconds begins to wonder whether it hangs.
_SECONDS = 2.0
# After a minute of patience a line every two seconds would only fill the log.
_PATIENT_AFTER = 60.0
_PATIENT_SECONDS = 10.0


@contextlib.contextmanager
def phase(comm: Communicator, doing: str, over: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Say on rank 0 what it is doing, and say again that it still does for as long as that lasts.

    Args:
        comm: the ranks.
        doing: as in "loading PyTorch".
        over: whether it has come to its end although the block has not.
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
        # Not through sys.stderr, whose lock a process forked at this moment would find taken for ever. A full disk is
        # for the main thread to report.
        with contextlib.suppress(OSError):
            os.write(2, f"hpctrain: still {doing} ({seconds:.0f} s)\n".encode())

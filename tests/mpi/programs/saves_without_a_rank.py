"""Trainings of which ranks die around a checkpoint, for test_saves_without_a_rank.py; see fault_tolerance.py.

Usage: saves_without_a_rank.py FOLDER. Three trainings one after the other, of 5 ranks at the begin and 1 at the end:

- publish: rank 0 dies when all shares of the last checkpoint are there, ahead of making it visible.
- share: rank 4 dies ahead of its share of the last checkpoint, for which rank 0 waits.
- abandon: rank 2 dies in a step, and rank 3 when it is to give up what is being written.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import fault_tolerance

import hpctrain as ht
from hpctrain.worker.train import checkpoint_saving
from hpctrain.worker.train.checkpoint_saving import Checkpoints

LAST = 12
CASES = {
    "publish": fault_tolerance.Case({"lost_rank": "shrink"}, ()),
    "share": fault_tolerance.Case({"lost_rank": "shrink"}, ()),
    "abandon": fault_tolerance.Case({"lost_rank": "shrink"}, ((2, "forward", 7),)),
}
# Until the other ranks wait for the dying one.
SECONDS = 0.5
publish, write_share, abandon = checkpoint_saving.publish, checkpoint_saving.write_share, Checkpoints.abandon


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def make_mortal(case: str, first: int) -> None:
    """Let this rank die where the case has it."""

    def dying_publish(fresh, progress, *arguments, **named):
        if (case, first, progress.iteration) == ("publish", 0, LAST):
            while len(list(fresh.glob("*.receipt"))) < progress.ranks:
                time.sleep(0.01)
            time.sleep(SECONDS)
            die()
        return publish(fresh, progress, *arguments, **named)

    def dying_share(fresh, share, rank, ranks, **named):
        if (case, first) == ("share", 4) and f"{LAST:08}" in fresh.name:
            time.sleep(SECONDS)
            die()
        return write_share(fresh, share, rank, ranks, **named)

    def dying_abandon(self):
        if (case, first) == ("abandon", 3):
            die()
        return abandon(self)

    checkpoint_saving.publish, checkpoint_saving.write_share, Checkpoints.abandon = (
        dying_publish,
        dying_share,
        dying_abandon,
    )


def main(folder: str) -> None:
    comm = ht.init("mpi")
    first = comm.rank
    fault_tolerance.CASES.update(CASES)
    for name in CASES:
        make_mortal(name, first)
        begin = time.perf_counter()
        done = fault_tolerance.run(Path(folder), "torch", name, comm, first)
        print(f"rank {first}: {name} {'done' if done else 'stopped'}, {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

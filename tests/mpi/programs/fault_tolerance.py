"""Trainings whose ranks die at chosen points, for test_fault_tolerance.py to look at what the others make of it.

Usage: fault_tolerance.py FOLDER FRAMEWORK CASE…; each case goes on with the ranks that the one before has left, and has
a run directory of its own name. A rank writes what it trained on to ``trained-RANK.jsonl`` there, and what it ends with
to ``end-RANK.npz``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import recipe_runs
from recipe_runs import data, new_trainer

import hpctrain as ht
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.records import RankRecord, write_record
from hpctrain.worker.comm.base import RanksLostError
from hpctrain.worker.data.samples import BROKEN, InMemory, Samples
from hpctrain.worker.train.checkpoint_saving import Checkpoints
from hpctrain.worker.train.loop import Loop
from hpctrain.worker.train.recovery import Recovery, require_fault_tolerance
from hpctrain.worker.train.state import GUARD_STEPS

BATCH, EPOCHS, RATE = 20, 3, 0.005
BASE = {
    "batch": {"size": BATCH},
    "optimizer": {"name": "sgd", "learning_rate": RATE, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "schedule": {"name": "cosine", "base_batch": 10, "warmup_epochs": 1},
    "epochs": EPOCHS,
}


@dataclass(frozen=True)
class Case:
    """What happens: ``deaths`` are (rank, point, step), of ranks as the program began; a rank that is ``late`` at a
    step learns of a death before its update, when others have done theirs."""

    tolerance: dict[str, object]
    deaths: tuple[tuple[int, str, int], ...]
    late: tuple[int, int] | None = None


CASES = {
    "keep": Case(
        {"lost_rank": "shrink"}, ((4, "forward", 3), (0, "updated", 6), (2, "rebuild", 6), (5, "evaluate", 8)), (3, 6)
    ),
    "shrink": Case({"lost_rank": "shrink", "batch": "shrink"}, ((6, "forward", 3),)),
    "few": Case({"lost_rank": "shrink", "min_ranks": 2}, ((3, "updated", 6),)),
    "keras": Case({"lost_rank": "shrink"}, ((0, "forward", 3),)),
}


def recipe(case: str) -> Recipe:
    return recipe_runs.recipe(**BASE, fault_tolerance=CASES[case].tolerance)


def parameters(trainer) -> np.ndarray:
    """Parameters and what the optimizer keeps, in one row. The guard counts from each recovery on."""
    state = trainer.state()
    names = [name for name in sorted(state) if "random" not in name and name != GUARD_STEPS]
    return np.concatenate([np.ravel(state[name]).astype(np.float64) for name in names])


class Watched(Samples):
    """Samples that know which of them were taken for the step in work."""

    taken: ClassVar[list[list[int]]] = []

    def __getitem__(self, rows):
        Watched.taken.append(np.arange(len(self))[rows].tolist())
        return Samples(images=self.images[rows], labels=self.labels[rows])


class Mortal:
    """A trainer that dies, or finds out late, where it is told to; and keeps account of its updates on disk."""

    def __init__(self, trainer, comm, first: int, case: Case, account: Path) -> None:
        self._trainer, self._comm, self._case = trainer, comm, case
        self._first, self._account = first, account
        self.iteration = lambda: 0

    def __getattr__(self, name):
        return getattr(self._trainer, name)

    @property
    def updates(self):
        return self._trainer.updates

    @updates.setter
    def updates(self, updates):
        self._trainer.updates = updates

    def step(self, parts, count, scale, rate, sgd_share, average=None):
        parts = list(parts)
        step = self.iteration() + 1
        self._die("forward", step)
        # A rank without a sample of its own has one of another's that does not count.
        mine = [
            index
            for rows, part in zip(Watched.taken[-len(parts) :], parts, strict=True)
            for index, label in zip(rows, part.labels, strict=True)
            if label != BROKEN
        ]
        late = self._case.late == (self._first, step)
        if late:
            self._find_out_late()
        try:
            loss = self._trainer.step(parts, count, scale, rate, sgd_share, average)
        except RanksLostError:
            # Its samples are in the mean, by which the others have updated.
            if late:
                self._account_for(step, mine)
            raise
        self._account_for(step, mine)
        self._die("updated", step)
        return loss

    def _account_for(self, step: int, samples: list[int]) -> None:
        with self._account.open("a") as file:
            file.write(json.dumps({"step": step, "samples": samples}) + "\n")

    def evaluate(self, samples):
        self._die("evaluate", self.iteration())
        return self._trainer.evaluate(samples)

    def rebuild(self):
        self._die("rebuild", self.iteration() + 1)
        self._trainer.rebuild()

    def _die(self, point: str, step: int) -> None:
        if (self._first, point, step) in self._case.deaths:
            os.kill(os.getpid(), signal.SIGKILL)

    def _find_out_late(self) -> None:
        """The others get through the end of a reduction that this rank does not."""
        size = self._comm.size

        def wait_for_death(*_: object) -> None:
            if self._case.late != (self._first, self.iteration() + 1) or self._comm.size < size:
                return
            deadline = time.monotonic() + 100
            while not self._comm.lost:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            raise RanksLostError("HT-rank-died", "found out late")

        self._trainer._optimizer.register_step_pre_hook(wait_for_death)


def train(settings: Recipe, comm: ht.Communicator, trainer, first: int, directory: RunDirectory) -> bool:
    train, test = data()
    with EventWriter(directory.events if comm.rank == 0 else None) as events:
        loop = Loop(
            settings,
            comm,
            trainer,
            InMemory(samples=Watched(images=train.images, labels=train.labels)),
            InMemory(samples=test),
            events,
            checkpoints=Checkpoints(directory.checkpoints, comm, events),
            recovery=Recovery(comm, trainer, events, directory),
        )
        trainer.iteration = lambda: loop.iteration
        return loop.run()


def run(folder: Path, framework: str, name: str, comm: ht.Communicator, first: int) -> bool:
    case, settings = CASES[name], recipe(name)
    require_fault_tolerance(comm, settings.fault_tolerance)
    directory = RunDirectory(folder / name)
    if comm.rank == 0:
        directory.ranks.mkdir(parents=True)
    comm.barrier()
    record = RankRecord(rank=first, host=comm.host, pid=os.getpid(), started=time.time(), status="running")
    write_record(directory, record)
    account = directory.path / f"trained-{first}.jsonl"
    trainer = Mortal(new_trainer(framework, settings, comm), comm, first, case, account)
    done = train(settings, comm, trainer, first, directory)
    np.savez(directory.path / f"end-{first}.npz", parameters=parameters(trainer), place=[comm.rank, comm.size])
    return done


def main(folder: str, framework: str, *cases: str) -> None:
    comm = ht.init("mpi")
    first = comm.rank
    for name in cases:
        done = run(Path(folder), framework, name, comm, first)
        print(f"rank {first}: {name} {'done' if done else 'stopped'}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

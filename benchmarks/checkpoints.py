"""Times a checkpoint: hpctrain's, ``torch.save`` of the same state, and the disk's own rate, in turn.

``hpctrain run benchmarks/checkpoints.py -np 2 --backend mpi -- FOLDER resnet50 10``: an empty folder on the disk, which
all ranks see, the network and the rounds. The state is that of a training that has done one step of SGD with momentum.
Rank 0 prints a row of JSON for each: ``variant``, ``median_s`` (of the slowest rank), ``mb_per_s`` and
``ratio_to_torch_save``.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI

import hpctrain as ht
from hpctrain.common.checkpoints.keep import Policy
from hpctrain.common.checkpoints.manifest import SavedProgress
from hpctrain.common.checkpoints.share import blocks_of_memory, write_through
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.sections import Batch, ModelSettings
from hpctrain.common.run.events import EventWriter, read_events
from hpctrain.common.run.events.kinds import CheckpointEvent
from hpctrain.report.benchmarks import ratio
from hpctrain.worker.bench.in_turn import rotated
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.train.checkpoint_saving import Checkpoints
from hpctrain.worker.train.torch_trainer import TorchTrainer

Seconds = dict[str, float]
Variant = Callable[[], Seconds]

_RECIPE = "goyal2017"
# The step serves only to create the momentum.
_IMAGE, _BATCH = 32, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """The state to write, and where.

    Attributes:
        trainer: this rank's, after its first step.
        nbytes: the size of the whole state, including each rank's own part.
    """

    folder: Path
    comm: Communicator
    trainer: TorchTrainer
    nbytes: int


def plain(case: Case, *, synchronised: bool) -> Variant:
    """``torch.save`` of the whole state by rank 0, while the others wait."""

    def save() -> Seconds:
        path = case.folder / f"state-{case.comm.rank}.pt"
        begin = time.perf_counter()
        if case.comm.rank == 0:
            torch.save({name: torch.from_numpy(value) for name, value in case.trainer.state().items()}, path)
            if synchronised:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        seconds = time.perf_counter() - begin
        path.unlink(missing_ok=True)
        return {"torch.save and fsync" if synchronised else "torch.save": seconds}

    return save


def disk(case: Case, *, writers: int) -> Variant:
    """As many bytes, written until they are on disk by the first ``writers`` ranks, each into its own file.

    They are written in the same way as a share, which reaches the highest rate of all ways.
    """
    content = blocks_of_memory(case.nbytes // writers)
    content[:] = np.random.default_rng(case.comm.rank).integers(0, 256, len(content), dtype=np.uint8)

    def write() -> Seconds:
        path = case.folder / f"disk-{case.comm.rank}"
        begin = time.perf_counter()
        if case.comm.rank < writers:
            with path.open("xb", buffering=0) as file:
                write_through(file.fileno(), content.data)
        seconds = time.perf_counter() - begin
        path.unlink(missing_ok=True)
        return {"disk, one file" if writers == 1 else "disk, a file a rank": seconds}

    return write


def checkpointed(case: Case) -> Variant:
    """A checkpoint as the training loop writes it, with the step during which it is copied, checked and written."""
    path = case.folder / "events.jsonl"
    checkpoints = Checkpoints(
        case.folder, case.comm, EventWriter(path if case.comm.rank == 0 else None), policy=Policy(last=1)
    )
    done = 0

    def save() -> Seconds:
        nonlocal done
        done += 1
        begin = time.perf_counter()
        checkpoints.save(_progress(done, case.comm.size), case.trainer)
        saved = blocked = time.perf_counter() - begin
        copied = case.trainer.before_update

        def before_update() -> None:
            nonlocal blocked
            begin = time.perf_counter()
            copied()
            blocked += time.perf_counter() - begin

        case.trainer.before_update = before_update
        _step(case.trainer, case.comm.rank)
        checkpoints.wait()
        written = 0.0
        if case.comm.rank == 0:
            *_, event = read_events(path)
            assert isinstance(event, CheckpointEvent) and event.seconds is not None
            written = event.seconds - saved
        return {"hpctrain, training waits": blocked, "hpctrain, writing": written}

    return save


def measure(world: MPI.Intracomm, variants: Sequence[Variant], rounds: int) -> dict[str, list[float]]:
    """The seconds of the slowest rank in each round, by variant. The first call of each is not counted."""
    found: dict[str, list[float]] = {}
    for variant in variants:
        found |= {name: [] for name in variant()}
    for number in range(rounds):
        for variant in rotated(variants, number):
            world.Barrier()
            for name, seconds in variant().items():
                found[name].append(world.allreduce(seconds, MPI.MAX))
    return found


def _progress(iteration: int, ranks: int) -> SavedProgress:
    return SavedProgress(
        iteration=iteration,
        epoch=1,
        ends_epoch=False,
        losses=(),
        sizes=(),
        epoch_seconds=0.0,
        seconds=0.0,
        ranks=ranks,
        samples="made up",
    )


def _trainer(model: str, comm: Communicator) -> TorchTrainer:
    recipe = load_recipe(_RECIPE)
    update = {"model": ModelSettings.model_validate({"name": model}), "batch": Batch(size=_BATCH * comm.size)}
    trainer = TorchTrainer(recipe.model_copy(update=update).at(comm.size), comm)
    _step(trainer, comm.rank)
    return trainer


def _step(trainer: TorchTrainer, rank: int) -> None:
    random = np.random.default_rng(rank)
    images = random.random((_BATCH, _IMAGE, _IMAGE, 3), dtype=np.float32)
    samples = Samples(images=images, labels=random.integers(0, 1000, _BATCH))
    trainer.step([samples], 1, 1 / _BATCH, 0.1, 1.0)


def main(folder: str, model: str, rounds: str) -> None:
    comm = ht.init("mpi")
    world = MPI.COMM_WORLD.Dup()
    trainer = _trainer(model, comm)
    nbytes = world.bcast(sum(value.nbytes for value in trainer.state().values()))
    case = Case(folder=Path(folder), comm=comm, trainer=trainer, nbytes=nbytes)
    variants = [
        plain(case, synchronised=False),
        plain(case, synchronised=True),
        disk(case, writers=1),
        *([disk(case, writers=comm.size)] if comm.size > 1 else []),
        checkpointed(case),
    ]
    seconds = measure(world, variants, int(rounds))
    if comm.rank:
        return
    for name, times in seconds.items():
        median = statistics.median(times)
        row = {
            "variant": name,
            "median_s": median,
            "mb_per_s": nbytes / median / 1e6,
            "ratio_to_torch_save": ratio(seconds, name, "torch.save"),
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])

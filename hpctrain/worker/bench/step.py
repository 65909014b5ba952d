"""Times one training step of a network with each way of reducing its gradients, and with none as the limit.

The calls with which hpctrain's training loop supervises a step are timed too.

``python step.py OUT.json MODEL ROUNDS BATCH IMAGE_SIZE`` on every rank. All variants train the same network from the
same weights in one process.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import hpctrain as ht
from hpctrain.common.recipes.reliability import GuardSettings, Numbers
from hpctrain.common.run import stopping
from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.events.kinds import StepEvent
from hpctrain.worker.adapters.torch.guarding import guard_of
from hpctrain.worker.bench.baselines import LeftOut, horovod_running, join_process_group, load_horovod
from hpctrain.worker.bench.in_turn import Call, TimedGroup, time_in_turn
from hpctrain.worker.bench.workloads import BenchWorkload, workload
from hpctrain.worker.comm.base import Communicator
from hpctrain.worker.comm.shared.kernels import BLOCK_BYTES, all_finite
from hpctrain.worker.train.checkpoint import Checkpoints
from hpctrain.worker.train.non_finite import FinishedStep, NonFiniteWatch
from hpctrain.worker.train.trainer import Trainer

# The size of the global batch whose checksum is in the event of each step.
_GLOBAL_BATCH = 256
_EACH, _CHECK = "supervision", "guard's check"


def alone(work: BenchWorkload) -> Call:
    """The limit: no communication between ranks."""
    model = work.build()
    return work.step(model, sgd(model))


def horovod_by_hand(work: BenchWorkload) -> Call:
    """Horovod as its documentation shows it."""
    import horovod.torch as hvd

    model = work.build()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return work.step(model, hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters()))


def ddp(work: BenchWorkload) -> Call:
    """PyTorch's own DistributedDataParallel on the default process group, with its defaults."""
    model = nn.parallel.DistributedDataParallel(work.build())
    return work.step(model, sgd(model))


def adapted(work: BenchWorkload, comm: Communicator, **settings: Any) -> Call:
    """``ht.distribute``, by default with its defaults."""
    model = work.build()
    return work.step(*ht.distribute(model, sgd(model), comm=comm, **settings))


def watched(work: BenchWorkload, comm: Communicator, folder: Path) -> dict[str, Call]:
    """The calls that the training loop adds, for a network that has done a step."""
    model = work.build()
    model, optimizer = ht.distribute(model, sgd(model), comm=comm)
    work.step(model, optimizer)()
    return loop_overhead(model, optimizer, comm, folder)


def loop_overhead(
    model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, folder: Path
) -> dict[str, Call]:
    """The calls that the loop adds to each step, and the guard's check, which is made every few steps.

    Args:
        model, optimizer: what ``ht.distribute`` returned, after a backward pass.
    """
    path = folder / "supervision.jsonl"
    events = EventWriter(path if comm.rank == 0 else None)
    checkpoints = Checkpoints(folder, comm, events)
    # After a step without a fault, the watch uses only this of the trainer.
    trainer = cast(Trainer, SimpleNamespace(faulty=False))
    watch = NonFiniteWatch(Numbers(), comm, trainer, checkpoints, events, folder / "dumps")
    batch = np.arange(_GLOBAL_BATCH)
    block = np.ones(BLOCK_BYTES // 4, np.float32)
    blocks = math.ceil(sum(parameter.nbytes for parameter in model.parameters()) / comm.size / BLOCK_BYTES)
    stopping.this_process.watch(folder / "stop")

    def each() -> None:
        # The reduction checks this rank's slice in the same way, each block while it is in the cache.
        for _ in range(blocks):
            all_finite(block)
        order = zlib.crc32(batch.astype("<i8").tobytes())
        stop = stopping.this_process.asked(look=comm.rank == 0) is not None
        loss = float(comm.allreduce(np.array([1.0, float(stop)]), "mean")[0])
        events.emit(
            StepEvent(
                iteration=1,
                epoch=1,
                loss=loss,
                learning_rate=0.1,
                samples=_GLOBAL_BATCH,
                first=0,
                order=order,
                seconds=0.1,
                communication_seconds=0.1,
                data_seconds=0.1,
            )
        )
        watch.check(FinishedStep(iteration=1, epoch=1, loss=loss, learning_rate=0.1, samples=batch))
        watch.apply_rule()
        checkpoints.record_written()

    return {_EACH: each, _CHECK: guard_of(optimizer).check}


def with_guard(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """The same times, but for :func:`loop_overhead`'s calls their sum in one step, and the guard's share of that."""
    every = GuardSettings().every
    found = dict(seconds)
    guard = [check / every for check in found.pop(_CHECK)]
    each = found.pop(_EACH)
    found["all supervision"] = [sum(both) for both in zip(each, guard, strict=True)]
    found["of it the guard"] = guard
    return found


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all steps."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _compressed(work: BenchWorkload, comm: Communicator) -> dict[str, Call]:
    """The variant with compression, which changes the numbers and only affects what is sent between hosts."""
    return {"hpctrain over mpi, fp16 sent": adapted(work, comm, compression="fp16")}


def variants(
    work: BenchWorkload, comm: Communicator, world: MPI.Intracomm, left_out: LeftOut, folder: Path
) -> list[TimedGroup]:
    """All variants that work on this machine; ``left_out`` gets the reasons why others do not."""
    group = join_process_group(world)
    calls = {
        "no communication": alone(work),
        "ddp over gloo": ddp(work),
        "hpctrain over gloo": adapted(work, group),
        "hpctrain over mpi": adapted(work, comm),
        **(_compressed(work, comm) if len(set(comm.allgather_object(comm.host))) > 1 else {}),
        **watched(work, comm, folder),
    }
    groups = [TimedGroup(calls=calls)]
    if not group.on_gpus:
        left_out["nccl"] = "not every rank has a GPU of its own"
    horovod = load_horovod(world, left_out)
    if horovod:
        running = partial(horovod_running, world)
        with running():
            calls = {"horovod by hand": horovod_by_hand(work), "hpctrain over horovod": adapted(work, horovod)}
        groups.append(TimedGroup(calls=calls, running=running))
    return groups


def main(out: str, model: str, rounds: str, batch: str, image_size: str) -> None:
    comm = ht.init("mpi")
    world = MPI.COMM_WORLD.Dup()
    left_out: LeftOut = {}
    work = workload(model, batch=int(batch), image_size=int(image_size), rank=comm.rank)
    groups = variants(work, comm, world, left_out, Path(out).parent)
    seconds = time_in_turn(world, groups, rounds=int(rounds))
    if comm.rank == 0:
        Path(out).write_text(json.dumps({"seconds": with_guard(seconds), "left_out": left_out}))


if __name__ == "__main__":
    main(*sys.argv[1:])

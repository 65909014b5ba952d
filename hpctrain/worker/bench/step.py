"""Times one training step of a network with each way of reducing its gradients, and with none as the limit.

``python step.py OUT.json MODEL ROUNDS BATCH IMAGE_SIZE`` on every rank. All variants train the same network from the
same weights in one process.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

import hpctrain as ht
from hpctrain.worker.bench.baselines import LeftOut, horovod_running, join_process_group, load_horovod
from hpctrain.worker.bench.in_turn import Call, TimedGroup, time_in_turn
from hpctrain.worker.bench.workloads import BenchWorkload, workload
from hpctrain.worker.comm.base import Communicator


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


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all steps."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _compressed(work: BenchWorkload, comm: Communicator) -> dict[str, Call]:
    """The variant with compression, which only affects what is sent between hosts; nothing on one."""
    if len(set(comm.allgather_object(comm.host))) == 1:
        return {}
    return {"hpctrain over mpi, fp16 sent": adapted(work, comm, compression="fp16")}


def variants(work: BenchWorkload, comm: Communicator, world: MPI.Intracomm, left_out: LeftOut) -> list[TimedGroup]:
    """All variants that work on this machine; ``left_out`` gets the reasons why others do not."""
    group = join_process_group(world)
    calls = {
        "no communication": alone(work),
        "ddp over gloo": ddp(work),
        "hpctrain over gloo": adapted(work, group),
        "hpctrain over mpi": adapted(work, comm),
        **_compressed(work, comm),
    }
    groups = [TimedGroup(calls=calls)]
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
    groups = variants(work, comm, world, left_out)
    seconds = time_in_turn(world, groups, rounds=int(rounds))
    if comm.rank == 0:
        Path(out).write_text(json.dumps({"seconds": seconds, "left_out": left_out}))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Times what hpctrain's training loop adds to a step: what it does in each, and the guard's check and the comparison of
the ranks' times every few steps.

``hpctrain run benchmarks/supervision.py -np 2 --backend mpi -- convnet 30 16``: the network of ``hpctrain bench step``,
rounds, and samples for each rank. Rank 0 prints a row of JSON for each: ``variant``, ``median_s``, and
``ratio_to_limit`` (a step without communication). What is done every few steps has its share of one step. On three
hosts or more the comparison measures links.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import hpctrain as ht
from hpctrain.common.recipes.reliability import GuardSettings, Numbers
from hpctrain.common.run import stopping
from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.events.kinds import StepEvent
from hpctrain.report.benchmarks import LIMIT, ratio
from hpctrain.worker.adapters.torch.optimizer_contents import guard_of
from hpctrain.worker.adapters.torch.trainable import reducers_of
from hpctrain.worker.bench.in_turn import Call, TimedGroup, time_in_turn
from hpctrain.worker.bench.step import alone, sgd
from hpctrain.worker.bench.workloads import workload
from hpctrain.worker.comm.base import Communicator
from hpctrain.worker.comm.rank_times import RankTimes
from hpctrain.worker.train.checkpoint_saving import Checkpoints
from hpctrain.worker.train.non_finite import NonFiniteWatch
from hpctrain.worker.train.trainer import Trainer

# The size of the global batch whose checksum is in the event of each step.
_GLOBAL_BATCH = 256
_EACH, _CHECK = "supervision", "guard's check"
_COUNTS, _COMPARES = "counting of a rank's times", "comparison of the ranks' times"
# More than the reductions of a step here, each of which is waited for.
_WAITS = 16


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
    watch = NonFiniteWatch(Numbers(), comm, trainer, checkpoints, events)
    batch = np.arange(_GLOBAL_BATCH)
    stopping.this_process.watch(folder / "stop")

    def each() -> None:
        torch.stack(torch._foreach_norm(reducers_of(model)[0].gradients(), 2.0)).sum().item()
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
        watch.check(1, 1, loss)
        watch.apply_rule()
        checkpoints.record_written()

    return {_EACH: each, _CHECK: guard_of(optimizer).check}


def search_for_slow_ranks(comm: Communicator) -> dict[str, Call]:
    """What finding slow ranks adds to each step, and the comparison, which is made every few steps."""
    times = RankTimes()

    def count() -> None:
        with times.reads():
            pass
        for _ in range(_WAITS):
            with times.waits():
                pass
        times.step_done()

    def compare() -> None:
        # Half of each step is spent in messages, so that links are measured.
        times._steps.extend([(1.0, 0.5, 0.0)] * GuardSettings().every)
        times.slow_ranks(comm, 1)

    return {_COUNTS: count, _COMPARES: compare}


def main(model: str, rounds: str, batch: str) -> None:
    comm = ht.init("mpi")
    work = workload(model, batch=int(batch), image_size=64, rank=comm.rank)
    network, optimizer = ht.distribute(*_network(work.build()), comm=comm)
    work.step(network, optimizer)()
    with tempfile.TemporaryDirectory() as folder:
        calls = {
            LIMIT: alone(work),
            **loop_overhead(network, optimizer, comm, Path(folder)),
            **search_for_slow_ranks(comm),
        }
        seconds = time_in_turn(MPI.COMM_WORLD.Dup(), [TimedGroup(calls=calls)], rounds=int(rounds))
    for name in (_CHECK, _COMPARES):
        seconds[name] = [each / GuardSettings().every for each in seconds[name]]
    for name, times in seconds.items() if comm.rank == 0 else ():
        row = {"variant": name, "median_s": statistics.median(times), "ratio_to_limit": ratio(seconds, name, LIMIT)}
        print(json.dumps(row))


def _network(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, sgd(model)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What the training loop adds to a step: its calls beyond forward and backward pass, reduction and update."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from torch import nn

from hpctrain.common.recipes.reliability import GuardSettings, Numbers
from hpctrain.common.run import stopping
from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.events.kinds import StepEvent
from hpctrain.worker.adapters.torch.guarding import guard_of
from hpctrain.worker.bench.in_turn import Call
from hpctrain.worker.comm.base import Communicator
from hpctrain.worker.comm.shared.kernels import BLOCK_BYTES, all_finite
from hpctrain.worker.train.checkpoint import Checkpoints
from hpctrain.worker.train.non_finite import FinishedStep, NonFiniteWatch
from hpctrain.worker.train.trainer import Trainer

# Of an epoch's order, whose checksum is in the event of each step.
_GLOBAL_BATCH = 256
_EACH, _CHECK = "supervision", "guard's check"


def loop_overhead(
    model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, folder: Path
) -> dict[str, Call]:
    """The calls that the loop adds to each step, and the guard's check, which is made every few steps.

    Args:
        model, optimizer: given to ``ht.distribute``, after a backward pass.
        folder: for events.
    """
    path = folder / "supervision.jsonl"
    events = EventWriter(path if comm.rank == 0 else None)
    checkpoints = Checkpoints(folder, comm, events)
    # Nothing else is asked of the trainer after a step without a fault.
    trainer = cast(Trainer, SimpleNamespace(faulty=False))
    watch = NonFiniteWatch(Numbers(), comm, trainer, checkpoints, events, folder / "dumps")
    batch = np.arange(_GLOBAL_BATCH)
    block = np.ones(BLOCK_BYTES // 4, np.float32)
    blocks = math.ceil(sum(parameter.nbytes for parameter in model.parameters()) / comm.size / BLOCK_BYTES)
    stopping.watch(folder / "stop")

    def each() -> None:
        # The reduction looks at this rank's slice so, each block while it is in the cache.
        for _ in range(blocks):
            all_finite(block)
        order = zlib.crc32(batch.astype("<i8").tobytes())
        stop = stopping.asked(look=comm.rank == 0) is not None
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
    """The same times, with the calls of :func:`loop_overhead` as their sum in one step and the guard's share of it."""
    every = GuardSettings().every
    found = dict(seconds)
    guard = [check / every for check in found.pop(_CHECK)]
    each = found.pop(_EACH)
    found["all supervision"] = [sum(both) for both in zip(each, guard, strict=True)]
    found["of it the guard"] = guard
    return found

"""A rank stops in the middle of a pipeline's step: what the others say. ``python hung_stage.py BACKEND SCHEDULE HOW``

The rank with the last stage but one does so in its second step. HOW: stop (SIGSTOP) or sleep in the forward pass of
micro-batch 1, backward (sleep in its backward pass), absent (before the step), evaluate (stop in an evaluation), or
thread (as stop, with groups whose limit is long, as where a GPU waits). Each of the others prints the error it gets.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import hpctrain as ht
from hpctrain.worker.adapters.torch.parallel.schedules import rank_of, stages_per_rank

backend, schedule, how = sys.argv[1:]
WIDTH, MICRO = 4, 4
comm = ht.init(backend)
mesh = ht.mesh(pp=comm.size)
if how == "thread":
    os.environ["HPCTRAIN_TIMEOUT"] = "2"
COUNT = comm.size * stages_per_rank(schedule, comm.size)
STAGE = COUNT - 2
RANK = rank_of(schedule, STAGE, comm.size)
step = 0


def hang() -> None:
    if how in ("stop", "evaluate", "thread"):
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


class Block(nn.Linear):
    def __init__(self, stage: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.stage, self.calls = stage, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if step == 2 and self.stage == STAGE:
            self.calls += 1
            if how in ("stop", "sleep", "evaluate", "thread") and self.calls == 2:
                hang()
            if how == "backward" and self.calls == 2:
                x.register_hook(lambda gradient: hang())
        return super().forward(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleDict({str(stage): Block(stage) for stage in range(COUNT)})
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.first, *self.blocks.values(), self.last):
            x = x if part is None else part(x)
        return x


torch.set_num_threads(1)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pipeline = ht.Pipeline(model, optimizer, nn.functional.mse_loss, mesh=mesh, schedule=schedule, micro_batches=MICRO)
x = torch.ones(2 * MICRO, WIDTH)
try:
    for step in (1, 2):
        if how == "absent" and step == 2 and comm.rank == RANK:
            hang()
        pipeline.evaluate(x, x) if how == "evaluate" and step == 2 else pipeline.step(x, x)
        optimizer.step()
        optimizer.zero_grad()
except ht.HpctrainError as error:
    print(f"{json.dumps({**error.record(), 'on': comm.rank, 'hangs': RANK, 'in': STAGE})}\n", end="", flush=True)
    Path(f"said-{comm.rank}").touch()
    end = time.monotonic() + 15
    while len([*Path().glob("said-*")]) < comm.size - 1 and time.monotonic() < end:
        time.sleep(0.1)
    os._exit(error.exit_code)

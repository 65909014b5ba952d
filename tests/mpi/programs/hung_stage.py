"""Rank 1 stops in its second step. ``python hung_stage.py BACKEND SCHEDULE``"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn

import hpctrain as ht
from hpctrain.worker.adapters.torch.parallel.schedules import SCHEDULES, rank_of

backend, schedule = sys.argv[1:]
WIDTH, MICRO = 4, 4
comm = ht.init(backend)
mesh = ht.mesh(pp=comm.size)
COUNT = comm.size * SCHEDULES[schedule][1]
STAGE = next(stage for stage in reversed(range(COUNT)) if rank_of(schedule, stage, comm.size) == 1)
step = 0


class Block(nn.Linear):
    def __init__(self, stage: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.stage, self.calls = stage, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if step == 2 and self.stage == STAGE:
            self.calls += 1
            if self.calls == 2:
                os.kill(os.getpid(), signal.SIGSTOP)
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
for step in (1, 2):  # noqa: B007  # the blocks read it
    pipeline.step(x, x)
    optimizer.step()
    optimizer.zero_grad()

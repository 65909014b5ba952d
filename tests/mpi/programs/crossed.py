"""Ranks whose loops are not of one length: ``python crossed.py BACKEND CASE``."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import hpctrain as ht

backend, case = sys.argv[1:]
comm = ht.init(backend)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
last = comm.rank == comm.size - 1


def step() -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()


if case == "early":
    for _ in range(5 if last else 6):
        step()
elif case == "stop":
    step()
    if last:
        ht.should_stop()
    else:
        step()
elif case == "slow":
    # a rank that others wait for is no reason to end: on its way to the end of the script, too
    for _ in range(2):
        if last:
            time.sleep(2.5)
        step()
    if comm.rank == 0:
        time.sleep(3)
    print("through", flush=True)

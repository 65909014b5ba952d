"""Trains a model on a process with little memory more than it has: ``python parallel_limit.py OUT``.

Its state is 4 times its parameters, and what a rank may still take is 2.5 times as much. Rank 0 writes the losses.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import torch
from torch import nn

LAYERS, WIDTH = 16, 1024
PARAMETERS = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
ALLOWED = 2.5 * PARAMETERS


class Layer(nn.Linear):
    pass


def limit() -> None:
    """Of writable memory, whatever libraries have mapped besides."""
    lines = Path("/proc/self/status").read_text().splitlines()
    now = 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmData:")))
    resource.setrlimit(resource.RLIMIT_DATA, (now + int(ALLOWED), resource.RLIM_INFINITY))


def train(layers: int, width: int, steps: int) -> list[float]:
    import hpctrain as ht

    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    mesh = ht.mesh(dp_shard=-1)
    model, optimizer = ht.distribute(model, optimizer, mesh=mesh, plan=ht.ParallelPlan(shard=[Layer]))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(torch.ones(4, width)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    import hpctrain as ht

    comm = ht.init("gloo")
    # What libraries and threads take at their first use is not the model's.
    train(2, 8, 2)
    limit()
    found = train(LAYERS, WIDTH, 3)
    if comm.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))

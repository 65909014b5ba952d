"""One training step: without communication, over Horovod's own optimizer, and through hpctrain, in one run.

``python step.py OUT.json ROUNDS BATCH`` on every rank. All variants train the same network from the same weights over
the same Horovod build. Each round times one step of each, in a rotating order, so that a change of the machine's
speed meets all of them; a round's time is that of its slowest rank.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn

import hpctrain as ht

WARMUP_ROUNDS = 5
Step = Callable[[torch.Tensor, torch.Tensor], None]


def convnet() -> nn.Module:
    """13 million parameters, in the proportions of an image classifier: few in the convolutions, many behind."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 64), (64, 128), (128, 256), (256, 512)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 768), nn.Linear(768, 10)
    )


def alone() -> Step:
    """The limit: no rank hears of another."""
    model = convnet()
    return _step(model, _sgd(model))


def by_hand() -> Step:
    """Horovod as its documentation shows it."""
    model = convnet()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return _step(model, hvd.DistributedOptimizer(_sgd(model), named_parameters=model.named_parameters()))


def adapted() -> Step:
    """The same through ht.distribute, with its defaults."""
    model = convnet()
    return _step(*ht.distribute(model, _sgd(model)))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        # no arguments: Horovod's optimizer knows none of PyTorch's newer ones
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def measure(variants: dict[str, Step], rounds: int, batch: int) -> dict[str, list[float]]:
    """Seconds of each variant in each round, the slowest rank's."""
    comm = ht.init()
    random = torch.Generator().manual_seed(comm.rank)
    x = torch.rand(batch, 3, 32, 32, generator=random)
    y = torch.randint(0, 10, (batch,), generator=random)
    seconds = np.zeros((rounds + WARMUP_ROUNDS, len(variants)))
    names = list(variants)
    for each in range(len(seconds)):
        for position in range(len(names)):
            which = (each + position) % len(names)
            comm.barrier()
            start = time.perf_counter()
            variants[names[which]](x, y)
            seconds[each, which] = time.perf_counter() - start
    slowest = comm.allreduce(seconds, "max")[WARMUP_ROUNDS:]
    return {name: slowest[:, index].tolist() for index, name in enumerate(names)}


def main(out: str, rounds: str, batch: str) -> None:
    comm = ht.init("horovod")
    hvd.init()
    variants = {"no communication": alone(), "horovod by hand": by_hand(), "hpctrain": adapted()}
    seconds = measure(variants, int(rounds), int(batch))
    if comm.rank == 0:
        Path(out).write_text(json.dumps(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])

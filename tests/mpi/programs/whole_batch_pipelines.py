"""Pipelines whose batches change their shape, and whose layers are frozen and unfrozen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import parallel
import torch
from situations import refused
from torch import nn
from torch.nn import functional as F
from whole_batches import CASES, Numbers

import hpctrain as ht

WORDS, WIDTH, BLOCKS = 20, 8, 4
BOTTOM, TOP = ("embed", "blocks.0", "blocks.1"), ("blocks.2", "blocks.3", "head")


class Net(nn.Module):
    """The mean over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleDict({str(i): nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for i in range(BLOCKS)})
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        if self.head is None:
            return x
        return self.head(x.mean(1))


def loss_of(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


class Training:
    """A pipeline over two ranks, or one stage on one process, and the numbers of its steps."""

    def __init__(self, schedule: str, frozen: tuple[str, ...] = ()) -> None:
        model = Net()
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        self.mesh = ht.mesh(pp=min(2, ht.init().size), dp_shard=-1)
        settings: dict[str, Any] = {"schedule": schedule, "micro_batches": 2}
        self.pipeline = ht.Pipeline(model, self.optimizer, loss_of, mesh=self.mesh, **settings)
        self.numbers: Numbers = []

    def own(self, *tensors: torch.Tensor) -> Iterator[torch.Tensor]:
        """This rank's even part of a batch along the ranks that divide samples."""
        parts = max(1, ht.init().size // 2)
        part = 0 if parts == 1 else self.mesh.get_local_rank("dp_shard")
        return (each.chunk(parts)[part] for each in tensors)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.numbers.append(self.pipeline.step(*self.own(x, y)))

    def evaluate(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.numbers.append(self.pipeline.evaluate(*self.own(x, y)))

    def update(self, clip: float = 0.0) -> None:
        if clip:
            self.numbers.append(float(self.pipeline.clip_grad_norm_(clip)))
        self.optimizer.step()
        self.optimizer.zero_grad()


def batch(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(31 * length + rows))
    return x, x[:, 0].contiguous()


def rows_and_lengths(at: Training) -> None:
    for rows, length in ((4, 5), (12, 5), (4, 3), (8, 6), (16, 3), (4, 5)):
        at.step(*batch(rows, length))
        at.update()


def evaluations_between(at: Training) -> None:
    for rows, length in ((4, 5), (8, 4), (4, 5)):
        at.step(*batch(rows, length))
        at.evaluate(*batch(4 * rows, length + 2))
        at.update()
        at.evaluate(*batch(rows, 3))


def frozen_stage(at: Training) -> None:
    for length in (7, 5, 3):
        at.step(*batch(8, length))
        at.update(clip=0.2)


def unfrozen_later(at: Training) -> None:
    at.step(*batch(8, 5))
    at.update(clip=0.2)
    for part in at.pipeline.stages:
        part.requires_grad_(True)
    for length in (5, 4, 5):
        at.step(*batch(8, length))
        at.update(clip=0.2)


def different_batches(at: Training) -> None:
    """What is said where the ranks of a pipeline get different batches, or targets that are not those of samples."""
    at.step(*batch(8, 5))
    if (comm := ht.init()).size != 2:
        return
    x, y = batch(8, 5)
    refused(lambda: at.pipeline.step(batch(8, 5 + comm.rank)[0], y), "HT-pipeline-different-batches")
    flat = {"samples": 8, "targets": 40}
    refused(lambda: at.pipeline.step(x, x.flatten()), "HT-pipeline-different-samples", **flat)
    refused(lambda: at.pipeline.step(x[:0], y[:0]), "HT-pipeline-different-samples", samples=0)


SHAPES: dict[str, tuple[Callable[[Training], None], dict[str, Any]]] = {
    "rows_and_lengths": (rows_and_lengths, {}),
    "evaluations_between": (evaluations_between, {}),
    "frozen_last_stage": (frozen_stage, {"frozen": TOP}),
    "unfrozen_later": (unfrozen_later, {"frozen": BOTTOM}),
    "different_batches": (different_batches, {}),
}


def trained(name: str, schedule: str) -> Numbers:
    train, options = SHAPES[name]
    training = Training(schedule, **options)
    train(training)
    return [*training.numbers, training.pipeline]


CASES |= {
    f"pipeline_{schedule}_{name}": functools.partial(trained, name, schedule)
    for schedule in parallel.PIPELINES
    for name in SHAPES
}

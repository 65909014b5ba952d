"""Trainings whose losses are divided by something other than samples: by one process on whole batches, or by ranks.

The samples are sentences, sorted by length, so that the ranks' parts of a batch hold very different numbers of tokens.
"""

from __future__ import annotations

import contextlib

import torch
from situations import Named
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpctrain as ht

CLASSES, LENGTH, WIDTH, IGNORED = 9, 6, 12, -100
# Samples and batch size. Over 2 and 3 ranks: always evenly; never; and with a last batch of one sample.
DIVISIONS = {"even": (24, 12), "uneven": (26, 7), "small": (22, 7)}
CASES = case = Named()
functional = nn.functional


class Run:
    """A script's view of the world: alone on whole batches (``comm`` is None), or one of the ranks."""

    def __init__(self, comm, ranks: int, samples: int, batch: int) -> None:
        self.comm, self.ranks, self.samples, self.batch = comm, ranks, samples, batch
        self.states: list[torch.Tensor] = []
        self.losses: list[float] = []

    def loader(self, *, batch: int | None = None, **settings):
        random = torch.Generator().manual_seed(7)
        ids = torch.randint(CLASSES, (self.samples, LENGTH), generator=random)
        lengths = torch.arange(self.samples)[:, None] * LENGTH // self.samples + 1
        labels = torch.where(torch.arange(LENGTH) < lengths, ids.roll(1, 1), IGNORED)
        loader = DataLoader(TensorDataset(ids, labels), batch_size=batch or self.batch, **settings)
        return ht.shard(loader) if self.comm else loader

    def train(self, model=None, optimizer=torch.optim.SGD, **settings):
        model = model or network()
        optimizer = optimizer(model.parameters(), lr=0.3)
        optimizer.register_step_post_hook(lambda *_: self.states.append(flat(model)))
        return ht.distribute(model, optimizer, **settings) if self.comm else (model, optimizer)

    def mean(self, total, count):
        return ht.mean_loss(total, count) if self.comm else total / count

    def sum(self, total):
        return ht.sum_loss(total) if self.comm else total

    def no_sync(self):
        return ht.no_sync() if self.comm else contextlib.nullcontext()

    def update(self, optimizer, loss):
        """One update, of which the loss is kept."""
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        self.losses.append(float(loss.detach()))


def network() -> nn.Module:
    return nn.Sequential(nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def flat(model) -> torch.Tensor:
    parts = [each.detach() for each in model.parameters()]
    return torch.cat([getattr(each, "full_tensor", lambda each=each: each)().reshape(-1).clone() for each in parts])


def tokens(logits, labels, **settings):
    """The cross entropy over tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **settings)

"""A script's view of the world: alone on whole batches, or one of the ranks; and the patterns that are run in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from situations import Named
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpctrain as ht

SEED, FEATURES = 3, 10
PATTERNS = pattern = Named()


class Whole:
    """What ``ht.shard`` divides, whole: the documented order, without hpctrain."""

    def __init__(self, loader: DataLoader, shuffled: bool) -> None:
        self._loader, self._shuffled, self._epoch = loader, shuffled, 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator:
        data, size = self._loader.dataset, self._loader.batch_size
        order = (
            np.random.default_rng((SEED, self._epoch)).permutation(len(data)) if self._shuffled else range(len(data))
        )
        self._epoch += 1
        starts = range(0, len(self) * size, size)
        return (self._loader.collate_fn([data[i] for i in order[start : start + size]]) for start in starts)


class Run:
    """A script's view of the world: alone on whole batches, or one of the ranks."""

    def __init__(self, comm, ranks: int, samples: int, batch: int, mesh: str = "") -> None:
        self.comm, self.ranks, self.samples, self.batch, self.mesh = comm, ranks, samples, batch, mesh
        self.states: list[torch.Tensor] = []

    def no_sync(self):
        return ht.no_sync() if self.comm else contextlib.nullcontext()

    def loader(self, samples=None, batch=None, *, evaluation=False, seed=0, shape=(FEATURES,), **settings):
        samples, batch = samples or self.samples, batch or self.batch
        random = np.random.default_rng(seed)
        x = torch.tensor(random.random((samples, *shape)))
        data = TensorDataset(x, torch.tensor(random.integers(0, 5, samples)))
        loader = DataLoader(data, batch_size=batch, shuffle=not evaluation, **settings)
        if not self.comm:
            return Whole(loader, not evaluation)
        sharded = ht.shard(loader, evaluation=evaluation, seed=SEED)
        sharded.set_epoch(0)  # a loader of the same data goes on where those of other patterns ended
        return sharded

    def distribute(self, model, optimizer=None):
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_post_hook(lambda *_: self.states.append(flat(model)))
        return ht.distribute(model, optimizer, **self._division(model)) if self.comm else (model, optimizer)

    def _division(self, model) -> dict:
        """``dp_shard=2`` gathers the whole model at once, ``dp_shard=2+units`` each linear layer by itself."""
        if not self.mesh:
            return {}
        sizes, _, units = self.mesh.partition("+")
        linear = any(isinstance(module, nn.Linear) for module in list(model.modules())[1:])
        plan = ht.ParallelPlan(shard=[nn.Linear] if units and linear else [])
        return {
            "mesh": ht.mesh(**{axis: int(n) for axis, n in (each.split("=") for each in sizes.split(";"))}),
            "plan": plan,
        }

    def trained(self, optimizer=None):
        model = network()
        return self.distribute(model, optimizer(model.parameters()) if optimizer else None)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6, dtype=torch.float64), nn.Tanh(), nn.Linear(6, 5, dtype=torch.float64))


def flat(model) -> torch.Tensor:
    return torch.cat([whole(parameter.detach()).reshape(-1).clone() for parameter in model.parameters()])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


cross_entropy = nn.functional.cross_entropy


def step(model, optimizer, x, y) -> None:
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()

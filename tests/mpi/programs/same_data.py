"""What ranks give ``ht.shard``: data that are alike, and data that differ. ``python same_data.py BACKEND OUT``.

Writes OUT-RANK.json: for each situation of :data:`ALIKE` the largest difference of the trained weights from those of
one process, for each of :data:`DIFFER` the refusal, and for each of :data:`STREAMS` what the ranks drew. Each rank is
seeded alike, unless a situation seeds it.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from random_streams import STREAMS, as_of_a_new_run
from situations import Named, run
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

import hpctrain as ht

SEED, BATCH, EPOCHS, FEATURES = 3, 8, 2, 4
ALIKE = alike = Named()
DIFFER = differ = Named()


def numbers():
    draw = np.random.default_rng(0)
    return torch.tensor(draw.random((29, FEATURES))), torch.tensor(draw.integers(0, 3, 29))


class Own(Dataset):
    """A data set of the user's own; ``change`` gets each sample and its index."""

    def __init__(self, change) -> None:
        self.x, self.y = numbers()
        self.change = change

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return self.change((self.x[index].clone(), self.y[index]), index)


def loader(data, **settings):
    return DataLoader(data, batch_size=settings.pop("batch_size", BATCH), shuffle=True, **settings)


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Linear(FEATURES, 3, dtype=torch.float64)


def step(model, optimizer, x, y) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def batch_of(batch):
    return (batch["x"], batch["y"]) if isinstance(batch, dict) else (batch[0], batch[1])


def trained(given) -> float:
    """The difference of the weights that the ranks train from those of one process on the documented order."""
    data, alone = given.dataset, network()
    own = torch.optim.SGD(alone.parameters(), lr=0.1)
    model = network()
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    kept = random.getstate(), np.random.get_state()[1].tolist()
    ht.init()._parts.pop("loaders", None)
    sharded = ht.shard(given, seed=SEED)
    assert kept == (random.getstate(), np.random.get_state()[1].tolist())
    for _ in range(EPOCHS):
        for batch in sharded:
            step(model, optimizer, *batch_of(batch))
    for epoch in range(EPOCHS):
        order = np.random.default_rng((SEED, epoch)).permutation(len(data))
        for start in range(0, len(data), given.batch_size):
            step(alone, own, *batch_of(given.collate_fn([data[i] for i in order[start : start + given.batch_size]])))
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


# Data that are alike.


@alike
def a_split_with_a_generator_on_ranks_that_are_seeded_apart(comm):
    torch.manual_seed(comm.rank)
    parts = random_split(TensorDataset(*numbers()), [20, 9], generator=torch.Generator().manual_seed(1))
    return trained(loader(parts[0]))


@alike
def a_data_set_of_dictionaries(comm):
    named = Own(lambda sample, i: {"x": sample[0], "y": sample[1], "path": f"/tmp/of-{comm.rank}/{i}.png", "id": i})
    return trained(loader(named))


def moved(noise):
    """Whether training with noisy inputs is not refused."""
    model = network()
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in ht.shard(loader(Own(lambda sample, i: (sample[0] + noise(i), sample[1]))), seed=SEED):
        step(model, optimizer, x, y)
    return 0.0


@alike
def random_transforms(comm):
    torch.manual_seed(comm.rank)
    return moved(lambda _: torch.rand(FEATURES) * (random.random() < 0.5) * (np.random.rand() < 0.5))


# Data that differ.


@differ
def lengths(comm):
    ht.shard(loader(TensorDataset(torch.arange(24 - 3 * (comm.rank == 1)))))


@differ
def an_unseeded_split(comm):
    torch.seed()
    ht.shard(loader(random_split(TensorDataset(*numbers()), [20, 9])[0]))


@differ
def files_in_the_order_of_the_directory(comm):
    names = [f"/data/{i}.png" for i in range(29)]
    next(iter(ht.shard(loader(names[::-1] if comm.rank else names))))


@differ
def files_that_differ_in_worker_processes(comm):
    data = Own(lambda sample, i: {"x": sample[0], "y": i * (1 + (comm.rank == 1))})
    next(iter(ht.shard(loader(data, num_workers=2))))


@differ
def batch_sizes(comm):
    ht.shard(loader(TensorDataset(*numbers()), batch_size=8 - 2 * (comm.rank == 1)))


@differ
def a_look_of_rank_0_alone(comm):
    sharded = ht.shard(loader(TensorDataset(*numbers())))
    if comm.rank == 0:
        next(iter(sharded))
    for _ in sharded:
        pass


@differ
def an_epoch_of_each_rank(comm):
    sharded = ht.shard(loader(TensorDataset(*numbers())))
    sharded.set_epoch(comm.rank)
    next(iter(sharded))


def begin(comm):
    as_of_a_new_run(comm)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


if __name__ == "__main__":
    run(ALIKE | DIFFER | STREAMS, begin)

"""What ``ht.shard`` does with streams and samplers of the script's own. ``python streams.py BACKEND OUT``.

Each rank compares its parts with the batches of one process, which is the same loader sharded over one rank.
"""

from __future__ import annotations

import argparse
import io
import itertools
import random
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
import webdataset
from situations import Named, refused, run
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import hpctrain as ht
from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.batch import BatchTensor
from hpctrain.worker.comm import current
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.data.sampling import part_of

SAMPLES, FEATURES = 29, 4
SITUATIONS = situation = Named()


def numbers() -> tuple[torch.Tensor, torch.Tensor]:
    draw = np.random.default_rng(0)
    return torch.tensor(draw.random((SAMPLES, FEATURES))), torch.tensor(draw.random(SAMPLES))


class Numbered(Dataset):
    """Samples that are their numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index):
        return int(index)


class Stream(IterableDataset):
    """Samples one after the other, each in one worker; ``order`` permutes a worker's."""

    def __init__(self, samples, order=lambda samples: samples) -> None:
        self.samples, self.order = samples, order

    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from self.order(list(self.samples)[number::workers])


def shuffled(samples):
    """With the process's generators, of all three kinds."""
    random.shuffle(samples)
    np.random.shuffle(samples)
    return [samples[i] for i in torch.randperm(len(samples))]


def alone(loader, **settings):
    return ht.shard(loader, comm=SingleCommunicator("one process"), **settings)


def own(batch) -> list:
    """What this rank holds of a batch."""
    if isinstance(batch, BatchTensor):
        return batch.local.tolist()
    return batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)


def drawn(sharded) -> list[list]:
    return [own(batch) for batch in sharded]


def own_of(batch: list) -> list:
    """The samples of a global batch that this rank computes."""
    comm = current()
    return batch[part_of(len(batch), comm.rank, comm.size)]


def as_one_process(make, count=2, own_of=own_of, **settings) -> list[list[list]]:
    """The global batches of each epoch, of which every rank got its part."""
    of_a_new_run()
    whole, parts = alone(make(), **settings), ht.shard(make(), **settings)
    found = []
    for _ in range(count):
        found.append(drawn(whole))
        assert drawn(parts) == [own_of(batch) for batch in found[-1]]
    return found


def resumes(make, at: int, own_of=own_of) -> None:
    """A loader that is left after ``at`` batches of its second epoch goes on there, on one rank and on these."""
    comm = current()
    of_a_new_run()
    whole, parts = alone(make(), seed=1), ht.shard(make(), seed=1)
    states = []
    for sharded in (whole, parts):
        list(sharded)
        list(itertools.islice(sharded, at))
        states.append(sharded.state_dict())
    assert states[0] == states[1] == comm.broadcast_object(states[0]), states
    assert (states[0]["epoch"], states[0]["batches"]) == (1, at)
    reference = alone(make(), seed=1)
    reference.set_epoch(1)
    rest, following = drawn(reference)[at:], drawn(reference)
    for sharded, part in ((alone(make(), seed=1), list), (ht.shard(make(), seed=1), own_of)):
        sharded.load_state_dict(states[0])
        assert drawn(sharded) == [part(batch) for batch in rest]
        assert drawn(sharded) == [part(batch) for batch in following]


def once(epochs) -> None:
    for epoch in epochs:
        assert sorted(sum(epoch, [])) == sorted(set(sum(epoch, []))) and len(sum(epoch, [])) == SAMPLES, epoch


# Streams.


@situation
def a_stream_in_its_order(comm):
    for workers in (0, 2):
        found = as_one_process(lambda n=workers: DataLoader(Stream(range(SAMPLES)), batch_size=6, num_workers=n))
        once(found)
        assert found[0] == drawn(DataLoader(Stream(range(SAMPLES)), batch_size=6, num_workers=workers))


@situation
def a_stream_that_shuffles_with_the_processs_generators(comm):
    for settings in ({}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}):
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        make = lambda s=settings: DataLoader(Stream(range(SAMPLES), shuffled), batch_size=6, **s)  # noqa: E731
        found = as_one_process(make)
        once(found)
        assert found[0] != found[1]
        assert before[:2] == (random.getstate(), np.random.get_state()[1].tolist())
        resumes(make, 5 if settings else 3)


def tar(folder: Path) -> list[str]:
    names = []
    for shard in range(5):
        names.append(str(folder / f"{shard}.tar"))
        with tarfile.open(names[-1], "w") as file:
            for number in range(shard, SAMPLES, 5):
                member = tarfile.TarInfo(f"{number:02}.txt")
                member.size = 2
                file.addfile(member, io.BytesIO(b"%02d" % number))
    return names


@situation
def webdatasets(comm):
    with tempfile.TemporaryDirectory() as folder:
        names = tar(Path(folder))
        for settings in ({"shardshuffle": False}, {"shardshuffle": 5, "detshuffle": True, "seed": 3}):

            def make(workers=0, settings=settings):
                data = webdataset.WebDataset(names, **settings).shuffle(10, seed=4)
                return DataLoader(data.map(lambda each: int(each["txt"])), batch_size=6, num_workers=workers)

            workers = 2 * settings.get("detshuffle", False)
            found = as_one_process(lambda n=workers: make(n))
            once(found)
            resumes(lambda n=workers: make(n), 3)
            assert (found[0] != found[1]) == settings.get("detshuffle", False)
        unseeded = webdataset.WebDataset(names, shardshuffle=False).shuffle(10)
        loader = ht.shard(DataLoader(unseeded.map(lambda each: int(each["txt"])), batch_size=6))
        if comm.size > 1:
            refused(lambda: list(loader), "HT-shard-different-data")


@situation
def what_divides_the_samples_already(comm):
    if comm.size == 1:
        return
    data = Stream(range(comm.rank, SAMPLES, comm.size))
    data._distributed = argparse.Namespace(rank=comm.rank, world_size=comm.size)
    sampler = DistributedSampler(Numbered(), comm.size, comm.rank)
    for given in (
        DataLoader(data, batch_size=2),
        DataLoader(Numbered(), batch_size=3, sampler=sampler),
        DataLoader(Numbered(), batch_sampler=BatchSampler(sampler, 3, drop_last=True)),
    ):
        refused(lambda: ht.shard(given), "HT-shard-divided-already")  # noqa: B023


@situation
def streams_that_differ(comm):
    if comm.size == 1:
        return
    own = random.Random(comm.rank)
    x, _ = numbers()
    for samples in (list(range(SAMPLES)), list(x)):
        mine = Stream(samples, lambda samples: own.sample(samples, len(samples)))
        refused(lambda: list(ht.shard(DataLoader(mine, batch_size=9))), "HT-shard-different-data")  # noqa: B023
    short = Stream(range(SAMPLES - 3 * (comm.rank == 1)))
    refused(lambda: list(ht.shard(DataLoader(short, batch_size=9))), "HT-shard-different-data", number=2, other=1)
    divided = Stream(range(comm.rank, SAMPLES, comm.size))
    refused(lambda: list(ht.shard(DataLoader(divided, batch_size=9))), "HT-shard-different-data")
    other = DataLoader(Stream(range(9)), batch_size=3, num_workers=comm.rank)
    refused(lambda: ht.shard(other), "HT-shard-different-data", where="num_workers")


# Samplers.


class OwnSampler(Sampler):
    """A user's own, of NumPy's generator, which no seed reaches."""

    def __iter__(self):
        yield from np.random.default_rng().permutation(SAMPLES).tolist()


class Lengths(Sampler):
    """Batches of random lengths, some with fewer samples than there are ranks; it has no length."""

    def __iter__(self):
        order = np.random.permutation(SAMPLES).tolist()
        while order:
            size = random.randint(0, 6)
            yield order[:size]
            del order[:size]


@situation
def samplers(comm):
    data = Numbered()
    kinds = {
        "replacement": lambda: RandomSampler(data, replacement=True, num_samples=40),
        "a few": lambda: RandomSampler(data, num_samples=10, generator=torch.Generator().manual_seed(3)),
        "weighted": lambda: WeightedRandomSampler(torch.arange(SAMPLES) % 3, 20),
        "a subset": lambda: SubsetRandomSampler(range(1, SAMPLES, 2)),
        "the first": lambda: SequentialSampler(range(10)),
    }
    for make, drop_last in itertools.product(kinds.values(), (False, True)):
        settings = {"batch_size": 4, "drop_last": drop_last, "num_workers": int(make is kinds["weighted"])}
        found = as_one_process(lambda m=make, s=settings: DataLoader(data, sampler=m(), **s))
        assert (found[0] != found[1]) == (make is not kinds["the first"])
        assert sum(map(len, found[0])) <= 10 or make is not kinds["the first"]
        assert all(len(batch) == 4 for batch in found[0]) or not drop_last
        if not drop_last:
            resumes(lambda m=make, s=settings: DataLoader(data, sampler=m(), **s), 2)
    found = as_one_process(lambda: DataLoader(data, batch_sampler=Lengths()), seed=2)
    once(found)
    assert min(map(len, found[0])) == 1
    resumes(lambda: DataLoader(data, batch_sampler=Lengths()), 3)


@situation
def an_order_that_no_seed_reaches(comm):
    loader = ht.shard(DataLoader(Numbered(), sampler=OwnSampler(), batch_size=6))
    parts = comm.allgather_object(drawn(loader))
    batches = [list(dict.fromkeys(sum(each, []))) for each in zip(*parts, strict=True)]
    once([batches])
    next(iter(loader))
    again = ht.shard(DataLoader(Numbered(), sampler=OwnSampler(), batch_size=6))
    again.load_state_dict(loader.state_dict())
    refused(lambda: next(iter(again)), "HT-loader-order-not-kept", epoch=1)


class Failing(Sampler):
    def __iter__(self):
        yield 1
        raise KeyError("labels")

    def __len__(self) -> int:
        return 2


@situation
def samplers_that_fail(comm):
    failing = DataLoader(Numbered(), batch_size=2, sampler=Failing())
    refused(lambda: list(ht.shard(failing)), "HT-loader-sampler-failed", reason="KeyError('labels')")


def of_a_new_run() -> None:
    """Forget the loaders that were made, whose epochs those of the same settings go on with."""
    ht.init()._parts.pop("loaders", None)


def begin(comm):
    of_a_new_run()
    # Nothing is seeded: ranks draw alike only where hpctrain makes them.
    random.seed()
    np.random.seed()


def as_record(action):
    def result(comm):
        try:
            return action(comm)
        except HpctrainError as error:
            raise AssertionError(error) from error

    return result


if __name__ == "__main__":
    run({name: as_record(action) for name, action in SITUATIONS.items()}, begin)

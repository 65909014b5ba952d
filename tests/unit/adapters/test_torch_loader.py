"""ht.shard on a PyTorch loader: what each rank sees, without starting ranks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, TensorDataset  # noqa: E402

from hpctrain.adapters.torch import shard  # noqa: E402
from hpctrain.adapters.torch.weights import computed_samples, own_samples  # noqa: E402
from hpctrain.comm.single import SingleCommunicator  # noqa: E402
from hpctrain.errors import HpctrainError  # noqa: E402


def rank_of(rank: int, size: int) -> SingleCommunicator:
    comm = SingleCommunicator("test")
    comm.rank, comm.size = rank, size
    return comm


def loader(samples: int, batch: int, **settings) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(samples)), batch_size=batch, **settings)


@pytest.mark.long
@given(samples=st.integers(1, 60), batch=st.integers(1, 20), ranks=st.integers(1, 7), epochs=st.integers(1, 3))
def test_training_sees_each_sample_once_an_epoch(samples, batch, ranks, epochs):
    comms = [rank_of(rank, ranks) for rank in range(ranks)]
    loaders = [shard(loader(samples, batch, shuffle=True), comm=comm, seed=1) for comm in comms]
    for epoch in range(epochs):
        order = np.random.default_rng((1, epoch)).permutation(samples)
        for step, parts in enumerate(zip(*loaders, strict=True)):
            whole = order[step * batch : (step + 1) * batch]
            for rank, (part,) in enumerate(parts):
                assert len(part) == computed_samples(len(whole), rank, ranks)
            own = [part[0].tolist() for rank, part in enumerate(parts) if own_samples(len(whole), rank, ranks)]
            assert sum(own, []) == whole.tolist()
        assert step + 1 == len(loaders[0])


def test_iterators_of_one_loader_are_epochs_of_their_own():
    sharded = shard(loader(12, 4, shuffle=True), comm=rank_of(0, 2), seed=1)
    drawn = [part.tolist() for pair in zip(sharded, sharded, strict=True) for (part,) in pair]
    again = shard(loader(12, 4, shuffle=True), comm=rank_of(0, 2), seed=1)
    first, second = ([part.tolist() for (part,) in again] for _ in range(2))
    assert drawn[::2] == first and drawn[1::2] == second and first != second


def test_iterators_that_share_worker_processes_are_refused():
    settings = {"num_workers": 1, "persistent_workers": True}
    sharded = shard(loader(12, 4, **settings), comm=rank_of(0, 2))
    first = iter(sharded)
    next(first)
    next(iter(sharded))
    with pytest.raises(HpctrainError, match="share its persistent workers"):
        next(first)


@pytest.mark.long
@given(samples=st.integers(1, 60), batch=st.integers(1, 20), ranks=st.integers(1, 7))
def test_evaluation_sees_each_sample_once_in_order(samples, batch, ranks):
    comms = [rank_of(rank, ranks) for rank in range(ranks)]
    loaders = [shard(loader(samples, batch), comm=comm, evaluation=True) for comm in comms]
    seen = [[int(i) for (part,) in each for i in part] for each in loaders]
    assert sorted(sum(seen, [])) == list(range(samples))
    assert all(len(each) == len(list(each)) for each in loaders)


def test_an_order_is_not_on_the_device_that_a_script_chose_for_what_it_makes():
    sharded = shard(loader(5, 2), comm=rank_of(0, 1), evaluation=True)
    with torch.device("meta"):
        # Drawing a batch asks PyTorch for a random number too, which this device has none of.
        assert len(sharded) == 3


def test_worker_processes_read_ahead_in_the_same_order():
    settings = {"shuffle": True, "num_workers": 1}
    ahead, alone = (shard(loader(9, 4, **each), comm=rank_of(0, 2)) for each in (settings, {"shuffle": True}))
    for _ in range(2):
        assert [part.tolist() for (part,) in ahead] == [part.tolist() for (part,) in alone]


def few_of(data, **settings) -> DataLoader:
    return DataLoader(data, sampler=RandomSampler(data, **settings))


class Stream(IterableDataset):
    def __iter__(self):
        yield 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: DataLoader(Stream()), "iterable dataset"),
        (lambda: DataLoader(TensorDataset(torch.arange(3)), sampler=SubsetRandomSampler([0])), "SubsetRandomSampler"),
        (lambda: DataLoader(TensorDataset(torch.arange(3)), batch_size=None), "batch_size"),
        (lambda: few_of(TensorDataset(torch.arange(3)), num_samples=2), "repeats or leaves out"),
        (lambda: few_of(TensorDataset(torch.arange(3)), replacement=True), "repeats or leaves out"),
    ],
)
def test_a_loader_that_cannot_be_divided_is_refused(data, message):
    with pytest.raises(HpctrainError, match=message):
        shard(data(), comm=rank_of(0, 2))

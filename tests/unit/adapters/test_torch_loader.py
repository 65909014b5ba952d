"""ht.shard on a PyTorch loader: what each rank sees, without starting ranks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, TensorDataset  # noqa: E402

from hpctrain.adapters.torch import shard  # noqa: E402
from hpctrain.comm.single import SingleCommunicator  # noqa: E402
from hpctrain.errors import HpctrainError  # noqa: E402


def rank_of(rank: int, size: int) -> SingleCommunicator:
    comm = SingleCommunicator("test")
    comm.rank, comm.size = rank, size
    return comm


def loader(samples: int, batch: int, **settings) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(samples)), batch_size=batch, **settings)


@given(samples=st.integers(1, 60), batch=st.integers(1, 20), ranks=st.integers(1, 7), epochs=st.integers(1, 3))
def test_training_sees_each_sample_once_an_epoch_with_the_weight_of_its_batch(samples, batch, ranks, epochs):
    comms = [rank_of(rank, ranks) for rank in range(ranks)]
    loaders = [shard(loader(samples, batch, shuffle=True), comm=comm, seed=1) for comm in comms]
    for epoch in range(epochs):
        seen = []
        order = np.random.default_rng((1, epoch)).permutation(samples)
        for step, parts in enumerate(zip(*loaders, strict=True)):
            for comm in comms:
                comm.batch_weighed = True  # as a backward pass does
            whole = order[step * batch : (step + 1) * batch]
            own = [part[0].tolist() if comm.batch_weight else [] for part, comm in zip(parts, comms, strict=True)]
            assert sum(own, []) == whole.tolist()
            for part, comm in zip(own, comms, strict=True):
                assert comm.batch_weight == pytest.approx(len(part) * ranks / len(whole))
            seen += sum(own, [])
        assert sorted(seen) == list(range(samples))
        assert step + 1 == len(loaders[0])
        assert all(comm.batch_weight == 1.0 for comm in comms)


@given(samples=st.integers(1, 60), batch=st.integers(1, 20), ranks=st.integers(1, 7))
def test_evaluation_sees_each_sample_once_in_order(samples, batch, ranks):
    comms = [rank_of(rank, ranks) for rank in range(ranks)]
    loaders = [shard(loader(samples, batch), comm=comm, evaluation=True) for comm in comms]
    seen = [[int(i) for (part,) in each for i in part] for each in loaders]
    assert sorted(sum(seen, [])) == list(range(samples))
    assert all(len(each) == len(list(each)) for each in loaders)


def test_training_in_the_given_order_weighs_as_well():
    comm = rank_of(0, 2)
    with torch.no_grad():
        seen = [(x.tolist(), comm.batch_weight) for (x,) in shard(loader(5, 4), comm=comm)]
    assert seen == [([0, 1], 1.0), ([4], 2.0)]


def test_drawing_ahead_is_refused_where_it_would_mix_up_weights():
    with pytest.raises(HpctrainError, match="before the backward pass of the one before"):
        list(shard(loader(5, 4), comm=rank_of(0, 2)))
    assert len(list(shard(loader(8, 4), comm=rank_of(0, 2)))) == 2


def test_worker_processes_read_ahead_without_disturbing_the_weights():
    comm = rank_of(0, 2)
    sharded = shard(loader(10, 4, shuffle=True, num_workers=1), comm=comm)
    weights = [comm.batch_weight for _ in sharded]
    assert weights == [1.0, 1.0, 1.0]
    sharded = shard(loader(9, 4, shuffle=True, num_workers=1), comm=comm)
    with torch.no_grad():
        assert [comm.batch_weight for _ in sharded] == [1.0, 1.0, 2.0]


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

"""ht.shard on a PyTorch loader: what each rank sees, without starting ranks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset  # noqa: E402

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
    loaders = [shard(loader(samples, batch), comm=rank_of(rank, ranks)) for rank in range(ranks)]
    seen = [[int(i) for (part,) in each for i in part] for each in loaders]
    assert sorted(sum(seen, [])) == list(range(samples))
    assert all(len(each) == len(list(each)) for each in loaders)


def test_worker_processes_read_ahead_without_disturbing_the_weights():
    comm = rank_of(0, 2)
    sharded = shard(loader(10, 4, shuffle=True, num_workers=1), comm=comm)
    weights = [comm.batch_weight for _ in sharded]
    assert weights == [1.0, 1.0, 1.0]
    sharded = shard(loader(9, 4, shuffle=True, num_workers=1), comm=comm)
    assert [comm.batch_weight for _ in sharded] == [1.0, 1.0, 2.0]


class Stream(IterableDataset):
    def __iter__(self):
        yield 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: DataLoader(Stream()), "iterable dataset"),
        (lambda: DataLoader(TensorDataset(torch.arange(3)), sampler=SubsetRandomSampler([0])), "SubsetRandomSampler"),
        (lambda: DataLoader(TensorDataset(torch.arange(3)), batch_size=None), "batch_size"),
    ],
)
def test_a_loader_that_cannot_be_divided_is_refused(data, message):
    with pytest.raises(HpctrainError, match=message):
        shard(data(), comm=rank_of(0, 2))

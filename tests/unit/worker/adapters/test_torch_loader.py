"""ht.shard on a PyTorch loader: what each rank sees, without starting ranks."""

from __future__ import annotations

import random

import pytest

from support.refusals import refused

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info  # noqa: E402

from hpctrain.worker.adapters.torch import shard  # noqa: E402
from hpctrain.worker.adapters.torch.batch import BatchTensor  # noqa: E402
from hpctrain.worker.comm.base import Group  # noqa: E402
from hpctrain.worker.comm.single import SingleCommunicator  # noqa: E402
from hpctrain.worker.data.sampling import part_of  # noqa: E402


@pytest.fixture(autouse=True)
def ranks_that_agree(monkeypatch):
    """The ranks of these tests are made one after the other, and all tell what this one does."""
    monkeypatch.setattr(Group, "gather", lambda group, value: [value] * group.size)


def rank_of(rank: int, size: int) -> SingleCommunicator:
    comm = SingleCommunicator("test")
    comm.rank, comm.size = rank, size
    return comm


def loader(samples: int, batch: int, **settings) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(samples)), batch_size=batch, **settings)


def own(batch) -> list:
    """The rows that a rank holds of a batch."""
    return batch.local.tolist()


@pytest.mark.long
@given(samples=st.integers(1, 60), batch=st.integers(1, 20), ranks=st.integers(1, 7), epochs=st.integers(1, 3))
def test_each_sample_comes_once_an_epoch(samples, batch, ranks, epochs):
    comms = [rank_of(rank, ranks) for rank in range(ranks)]
    loaders = [shard(loader(samples, batch, shuffle=True), comm=comm, seed=1) for comm in comms]
    for epoch in range(epochs):
        order = np.random.default_rng((1, epoch)).permutation(samples)
        for step, parts in enumerate(zip(*loaders, strict=True)):
            whole = order[step * batch : (step + 1) * batch]
            for rank, (part,) in enumerate(parts):
                assert len(part) == len(whole) and type(part) is (BatchTensor if ranks > 1 else torch.Tensor)
                assert own(part) == whole[part_of(len(whole), rank, ranks)].tolist()
        assert step + 1 == len(loaders[0])


GENERATORS = [np.random.default_rng, np.random.RandomState, random.Random]


def drawn_by(generator) -> float:
    return float(generator.gauss(0, 1) if isinstance(generator, random.Random) else generator.normal())


class Noisy(torch.utils.data.Dataset):
    """Samples that are drawn with the process's generators, and with one that a transform holds."""

    def __init__(self, kind) -> None:
        self.transforms = [{"noise": kind(3)}]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index):
        return [torch.rand(()).item(), random.random(), np.random.rand(), drawn_by(self.transforms[0]["noise"])]


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_of_samples_are_those_of_one_process(kind, workers):
    def epochs_of_rank(rank, ranks, workers=0):
        given = DataLoader(Noisy(kind), batch_size=7, shuffle=True, num_workers=workers)
        sharded = shard(given, comm=rank_of(rank, ranks), seed=1)
        return [[[own(column) for column in batch] for batch in sharded] for _ in range(2)]

    before = random.getstate(), np.random.get_state()[1].tolist()
    whole = epochs_of_rank(0, 1)
    parts = [epochs_of_rank(rank, 3, workers) for rank in range(3)]
    assert before == (random.getstate(), np.random.get_state()[1].tolist())
    for epoch, batches in enumerate(whole):
        for number, batch in enumerate(batches):
            for column, values in enumerate(batch):
                assert sum((part[epoch][number][column] for part in parts), []) == values
    numbers = [value for epoch in whole for batch in epoch for column in batch for value in column]
    assert len(set(numbers)) == len(numbers) == 2 * 24 * 4


coins = np.random.default_rng(5)


class OfTheModule(Noisy):
    def __getitem__(self, index):
        return coins.random()


def test_generators_of_a_module_are_found_and_restored():
    before = coins.bit_generator.state
    parts = [shard(DataLoader(OfTheModule(random.Random), batch_size=24), comm=rank_of(r, 2)) for r in range(2)]
    (first,), (second,) = (list(each) for each in parts)
    assert not set(own(first)) & set(own(second)) and coins.bit_generator.state == before


class AtOnce(Noisy):
    """As the data sets of Hugging Face: a batch is fetched at once."""

    def __init__(self, noise) -> None:
        self.noise, self.fetches = noise, []

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        self.fetches.append(len(indices))
        return [index + random.random() if self.noise else index for index in indices]


@pytest.mark.parametrize("noise", [False, True])
def test_samples_that_are_fetched_at_once_have_the_numbers_of_one_process(noise):
    whole = own(next(iter(shard(DataLoader(AtOnce(noise), batch_size=24), comm=rank_of(0, 1)))))
    data = [AtOnce(noise) for _ in range(2)]
    loaders = [shard(DataLoader(each, batch_size=24), comm=rank_of(r, 2)) for r, each in enumerate(data)]
    assert sum((own(next(iter(each))) for each in loaders), []) == whole
    # Four samples are looked at twice, for the ranks to compare.
    assert data[0].fetches == [1] * 8 + ([12] if not noise else [12, *[1] * 12])


def test_iterators_that_share_worker_processes_are_refused():
    settings = {"num_workers": 1, "persistent_workers": True}
    sharded = shard(loader(12, 4, **settings), comm=rank_of(0, 2))
    first = iter(sharded)
    next(first)
    next(iter(sharded))
    with refused("HT-loader-two-iterators"):
        next(first)


SETTINGS = {
    "in the script's process": {},
    "workers": {"num_workers": 2, "prefetch_factor": 2},
    "persistent workers": {"num_workers": 1, "persistent_workers": True},
}


def epochs_of(samples: int, batch: int, epochs: int) -> list[list[list[int]]]:
    """The global batches of each epoch, as NumPy's generator gives them."""
    orders = [np.random.default_rng((3, epoch)).permutation(samples).tolist() for epoch in range(epochs)]
    return [[order[begin : begin + batch] for begin in range(0, samples, batch)] for order in orders]


def resumed(loaders: list, state: dict[str, int]) -> list:
    for each in loaders:
        each.load_state_dict(state)
    return loaders


def joined(parts) -> list[int]:
    """A global batch of what the ranks got."""
    return [sample for (part,) in parts for sample in own(part)]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_a_loader_continues_in_the_middle_of_an_epoch_on_another_number_of_ranks(settings, before, after):
    whole = epochs_of(11, 4, 3)

    def loaders(ranks: int) -> list:
        return [shard(loader(11, 4, shuffle=True, **settings), comm=rank_of(r, ranks), seed=3) for r in range(ranks)]

    first = loaders(before)
    assert [joined(parts) for parts in zip(*first, strict=True)] == whole[0]
    drawing = zip(*first, strict=True)
    assert joined(next(drawing)) == whole[1][0]
    # What workers have read ahead by now is not done.
    states = [each.state_dict() for each in first]
    assert states[0] == states[-1] and (states[0]["epoch"], states[0]["batches"]) == (1, 1)
    second = resumed(loaders(after), states[0])
    assert [each.state_dict() for each in second] == [states[0]] * after
    assert [joined(parts) for parts in zip(*second, strict=True)] == whole[1][1:]
    assert [len(each) for each in second] == [3] * after
    assert [joined(parts) for parts in zip(*second, strict=True)] == whole[2]
    assert {each.state_dict()["epoch"] for each in second} == {3}


def drawn(sharded) -> list[list[int]]:
    return [own(part) for (part,) in sharded]


def test_an_epoch_is_chosen_by_its_number_and_keeps_the_place_that_was_loaded_in_it():
    whole = epochs_of(9, 4, 6)
    one = shard(loader(9, 4, shuffle=True), comm=rank_of(0, 1), seed=3)
    one.set_epoch(5)
    assert drawn(one) == whole[5]
    one.set_epoch(2)
    for (part,) in one:
        assert part.tolist() == whole[2][0]
        break
    state = one.state_dict()
    other = shard(loader(9, 4, shuffle=True), comm=rank_of(0, 1), seed=3)
    other.load_state_dict(state)
    other.set_epoch(2)
    assert drawn(other) == whole[2][1:]
    other.load_state_dict(state)
    other.set_epoch(4)
    assert drawn(other) == whole[4]


def test_the_generator_is_where_it_was_when_the_epoch_goes_on():
    """The begin of an epoch draws a seed for workers, which an epoch that goes on has drawn before."""
    whole, part = (shard(loader(12, 4, shuffle=True), comm=rank_of(0, 1), seed=3) for _ in range(2))
    torch.manual_seed(7)
    numbers = []
    for count, _ in enumerate(whole):
        if count == 1:
            state, generator = whole.state_dict(), torch.get_rng_state()
        numbers.append(torch.rand(1).item())
    part.load_state_dict(state)
    torch.set_rng_state(generator)
    again = [torch.rand(1).item()]
    again += [torch.rand(1).item() for _ in part]
    assert again == numbers[1:]


@pytest.mark.parametrize(
    ("state", "differ"),
    [
        ({"batch_size": 8}, "batch_size was 8 and is 4"),
        ({"samples": 13}, "samples was 13 and is 12"),
        ({"seed": 1}, "seed was 1 and is 3"),
    ],
)
def test_a_place_among_other_batches_is_refused_and_the_begin_of_an_epoch_is_not(state, differ):
    one = shard(loader(12, 4, shuffle=True), comm=rank_of(0, 1), seed=3)
    begun = one.state_dict()
    with refused("HT-loader-order-not-kept", epoch=2, differ=differ):
        one.load_state_dict({**begun, "epoch": 2, "batches": 1, **state})
    one.load_state_dict({**begun, "epoch": 2, **state})
    assert drawn(one) == epochs_of(12, 4, 3)[2]
    with refused("HT-loader-bad-state"):
        one.load_state_dict({"epoch": 1, "batches": 0})


def test_a_loader_that_is_made_again_goes_on_with_the_next_epoch():
    comm, whole = rank_of(0, 1), epochs_of(9, 4, 6)
    data = Noisy(random.Random), TensorDataset(torch.arange(9))

    def made(data=data[1], **settings):
        return shard(DataLoader(data, batch_size=4, shuffle=True, **settings), comm=comm, seed=3)

    torch.manual_seed(0)
    assert [drawn(made()) for _ in range(2)] == whole[:2]
    # The same tensors in a new data set, and one loader for two epochs.
    kept = made(TensorDataset(torch.arange(9)))
    assert [drawn(kept), drawn(kept), drawn(made())] == whole[2:5]
    # Another data set, or other settings.
    assert drawn(shard(loader(8, 4, shuffle=True), comm=comm, seed=3)) == epochs_of(8, 4, 1)[0]
    assert drawn(made(drop_last=True)) == whole[0][:2]
    # PyTorch's generator gives the same orders again.
    torch.manual_seed(0)
    assert [drawn(made()) for _ in range(2)] == whole[:2]
    seeded = torch.Generator()
    for _ in range(2):
        seeded.manual_seed(4)
        assert drawn(made(generator=seeded)) == whole[5]
    assert len(list(shard(DataLoader(data[0], batch_size=24), comm=comm))) == 1


class Uneven(IterableDataset):
    """Its first worker has one sample, the second six."""

    def __iter__(self):
        worker = get_worker_info()
        return iter([0] if worker.id == 0 else range(1, 7))


def test_a_stream_of_uneven_workers_goes_on_after_each_batch():
    def stream():
        return shard(DataLoader(Uneven(), batch_size=1, num_workers=2), comm=rank_of(0, 1), seed=1)

    whole, states = [], []
    source = stream()
    for batch in source:
        whole += batch.tolist()
        states.append(source.state_dict())
    assert sorted(whole) == [*range(7)]
    for number, state in enumerate(states[:-1], 1):
        again = stream()
        again.load_state_dict(state)
        assert [row for batch in again for row in batch.tolist()] == whole[number:]


def test_a_pipe_is_refused():
    """DataLoader divides it over its workers only where it sees it."""
    pipe = torch.utils.data.datapipes.iter.IterableWrapper(range(8))
    with refused("HT-shard-wrong-data"):
        shard(DataLoader(pipe, batch_size=2), comm=rank_of(0, 2))

"""ht.shard on a PyTorch loader: what each rank sees, without starting ranks."""

from __future__ import annotations

import random
import re

import pytest

from support.refusals import refused

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from hpctrain.common.errors import HpctrainError  # noqa: E402
from hpctrain.common.recipes.mesh import Mesh  # noqa: E402
from hpctrain.worker.adapters.data_ranks import set_mesh  # noqa: E402
from hpctrain.worker.adapters.torch import shard  # noqa: E402
from hpctrain.worker.adapters.torch.weights import computed_samples, own_samples  # noqa: E402
from hpctrain.worker.comm.single import SingleCommunicator  # noqa: E402


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


@pytest.mark.parametrize("kind", [np.random.default_rng, np.random.RandomState, random.Random])
def test_a_data_set_s_own_random_numbers_are_as_without_a_comparison(kind):
    class Noisy(torch.utils.data.Dataset):
        def __init__(self):
            self.transforms = [{"noise": kind(3)}]

        def __len__(self):
            return 8

        def __getitem__(self, index):
            return getattr(self.transforms[0]["noise"], "normal" if kind is not random.Random else "gauss")(0, 1)

    plain, sharded = DataLoader(Noisy()), shard(DataLoader(Noisy(), batch_size=2), comm=rank_of(0, 2))
    assert next(iter(sharded)) == next(iter(plain))


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
    with refused("HT-loader-two-iterators"):
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
    """A global batch of what the ranks got: a rank that has none of it computes another's first sample."""
    return list(dict.fromkeys(sample for (part,) in parts for sample in part.tolist()))


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
    return [part.tolist() for (part,) in sharded]


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


def test_after_the_last_batch_of_an_epoch_nothing_of_it_comes_again():
    one = shard(loader(8, 4, shuffle=True), comm=rank_of(0, 1), seed=3)
    states = [one.state_dict() for _ in one]
    assert [(state["epoch"], state["batches"]) for state in [*states, one.state_dict()]] == [(0, 1), (0, 2), (1, 0)]
    other = shard(loader(8, 4, shuffle=True), comm=rank_of(0, 1), seed=3)
    other.load_state_dict(states[-1])
    # The script's epoch ends, with what it does then.
    assert drawn(other) == []
    assert drawn(other) == epochs_of(8, 4, 2)[1]


def test_an_evaluation_continues_at_its_global_batch():
    first = [shard(loader(10, 4), comm=rank_of(r, 2), evaluation=True) for r in range(2)]
    drawing = zip(*first, strict=True)
    next(drawing)
    second = resumed(
        [shard(loader(10, 4), comm=rank_of(r, 3), evaluation=True) for r in range(3)], first[0].state_dict()
    )
    assert sorted(sum((sum(drawn(each), []) for each in second), [])) == list(range(4, 10))


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
    with refused("HT-loader-different-batches", epoch=2, differ=differ):
        one.load_state_dict({**begun, "epoch": 2, "batches": 1, **state})
    one.load_state_dict({**begun, "epoch": 2, **state})
    assert drawn(one) == epochs_of(12, 4, 3)[2]
    with refused("HT-loader-bad-state"):
        one.load_state_dict({"epoch": 1, "batches": 0})


@pytest.mark.slow
@given(samples=st.integers(1, 40), batch=st.integers(1, 12), ranks=st.integers(2, 5))
def test_an_evaluation_that_some_ranks_would_skip_is_refused_where_they_compute_together(samples, batch, ranks):
    comm = rank_of(0, 2 * ranks)
    set_mesh(comm, Mesh(pp=2, dp_replicate=ranks))
    sizes = {len(each) for each in torch.arange(samples).split(batch)}
    try:
        list(shard(loader(samples, batch), comm=comm, evaluation=True))
    except HpctrainError as error:
        assert min(sizes) < ranks
        if found := re.search(r"batch_size=(\d+)", str(error)):
            list(shard(loader(samples, int(found[1])), comm=comm, evaluation=True))
        else:
            assert samples < ranks
    else:
        assert min(sizes) >= ranks

"""Every sample exactly once an epoch, whatever the ranks and the batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.recipes.sections import Batch, Data
from hpctrain.worker.data.sampling import (
    batch_count,
    epoch_order,
    global_batches,
    parts,
    repetition_of,
    sample_of,
    share,
)

counts = st.integers(1, 300)
ranks_ = st.integers(1, 17)
seeds = st.integers(0, 2**32 - 1)


def shares(samples: int, size: int, ranks: int, *, seed: int = 0, epoch: int = 0, drop_last: bool = False):
    """By global batch, the shares of all ranks."""
    order = epoch_order(samples, seed=seed, epoch=epoch)
    batches = global_batches(order, size, drop_last=drop_last)
    return [[share(batch, rank, ranks) for rank in range(ranks)] for batch in batches]


@given(counts, counts, ranks_, seeds, st.integers(0, 100))
def test_every_sample_exactly_once(samples, size, ranks, seed, epoch):
    seen = [own.indices[: own.count] for batch in shares(samples, size, ranks, seed=seed, epoch=epoch) for own in batch]
    assert sorted(np.concatenate(seen)) == list(range(samples))


@given(counts, counts, ranks_)
def test_weights_make_the_mean_over_ranks_the_mean_over_the_batch(samples, size, ranks):
    values = np.random.default_rng(samples).normal(size=samples)
    order = epoch_order(samples, seed=0, epoch=0)
    for batch, own in zip(global_batches(order, size, drop_last=False), shares(samples, size, ranks), strict=True):
        assert np.mean([part.weight for part in own]) == pytest.approx(1)
        mean = np.mean([part.weight * values[part.indices].mean() for part in own])
        assert mean == pytest.approx(values[batch].mean(), abs=1e-12)


@given(counts, counts, ranks_, seeds)
def test_global_batches_do_not_depend_on_the_number_of_ranks(samples, size, ranks, seed):
    several = [np.concatenate([own.indices[: own.count] for own in b]) for b in shares(samples, size, ranks, seed=seed)]
    one = [batch[0].indices for batch in shares(samples, size, 1, seed=seed)]
    for joined, whole in zip(several, one, strict=True):
        np.testing.assert_array_equal(joined, whole)


@given(counts, ranks_, st.integers(1, 40))
def test_every_rank_has_as_many_parts_none_empty_and_none_larger_than_asked_for(samples, ranks, micro_batch):
    """Layers that talk to other ranks do so once a part."""
    batch, settings = np.arange(samples), Batch(size=samples, micro_batch=micro_batch)
    count, seen = settings.parts(samples, ranks), []
    for rank in range(ranks):
        own = share(batch, rank, ranks)
        cuts = parts(own, count)
        assert len(cuts) == count
        assert min(map(len, cuts)) >= 1 and max(map(len, cuts)) <= settings.at_once(ranks) <= micro_batch
        # What is there again is a part, or the whole share, of its own.
        assert own.count in np.cumsum([0, *map(len, cuts)])
        seen += np.concatenate(cuts)[: own.count].tolist()
    assert seen == batch.tolist()


@given(counts, counts)
def test_drop_last_leaves_out_only_the_smaller_batch(samples, size):
    order = epoch_order(samples, seed=3, epoch=1)
    whole = list(global_batches(order, size, drop_last=True))
    assert all(len(batch) == size for batch in whole)
    assert len(whole) == samples // size == batch_count(samples, size, drop_last=True)
    every = list(global_batches(order, size, drop_last=False))
    assert len(every) == batch_count(samples, size, drop_last=False)
    np.testing.assert_array_equal(np.concatenate(every), order)
    for kept, same in zip(whole, every, strict=False):
        np.testing.assert_array_equal(kept, same)


def test_order_changes_with_epoch_and_seed_and_with_nothing_else():
    orders = [epoch_order(1000, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({order.tobytes() for order in orders}) == 4
    np.testing.assert_array_equal(orders[0], epoch_order(1000, seed=0, epoch=0))


def sampled(samples: int, ranks: int, repeats: int, order: np.ndarray) -> list[list[tuple[int, int]]]:
    """What each rank of torchvision's RASampler is given, with which repetition it is, of a shuffled order."""
    repeated = [(int(index), repetition) for index in order for repetition in range(repeats)]
    kept = samples // 256 * 256 // ranks
    return [repeated[rank::ranks][:kept] for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "each", "repeats"), [(8, 16, 4), (4, 32, 3), (2, 8, 2), (8, 4, 3)])
@pytest.mark.parametrize("samples", [512, 700, 1000])
def test_steps_with_repetitions_are_those_of_torchvisions_sampler(samples, ranks, each, repeats):
    """As many, in the same order, of the same images in the same repetitions, on whatever rank."""
    length = Data(name="imagenet", repeats=repeats).per_epoch(samples)
    order = epoch_order(samples, seed=3, epoch=5, repeats=repeats, length=length)
    batches = list(global_batches(order, ranks * each, drop_last=False))
    plain = epoch_order(samples, seed=3, epoch=5)
    expected = sampled(samples, ranks, repeats, plain)
    assert sum(map(len, batches)) == sum(map(len, expected))
    for step, batch in enumerate(batches):
        found = list(zip(sample_of(batch).tolist(), repetition_of(batch).tolist(), strict=True))
        assert sorted(found) == sorted(sum((own[step * each : (step + 1) * each] for own in expected), []))


@pytest.mark.slow
@given(
    samples=st.integers(1, 3000),
    size=st.integers(1, 200),
    repeats=st.integers(2, 5),
    ranks=st.integers(1, 9),
    seed=seeds,
)
def test_repetitions_are_counted_and_stand_apart(samples, size, repeats, ranks, seed):
    length = Data(name="imagenet", repeats=repeats).per_epoch(samples)
    assert length == (samples - samples % 256 or samples)
    order = epoch_order(samples, seed=seed, epoch=1, repeats=repeats, length=length)
    assert len(order) == length == len(set(order.tolist()))
    assert len(set(sample_of(order).tolist())) == -(-length // repeats)
    batches = list(global_batches(order, size, drop_last=False))
    # Where an epoch is gone on with, the rest of its steps is the same.
    rest = list(global_batches(order[size:], size, drop_last=False))
    for whole, resumed in zip(batches[1:], rest, strict=True):
        np.testing.assert_array_equal(whole, resumed)
    for batch in batches:
        if ranks <= repeats and len(batch) % repeats:
            continue
        for rank in range(ranks):
            own = sample_of(share(batch, rank, ranks).indices)
            if len(own) * repeats <= len(batch) - repeats:
                assert len(set(own.tolist())) == len(own)

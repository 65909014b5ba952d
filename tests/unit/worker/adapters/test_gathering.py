"""``ht.gather`` and ``ht.mean`` against what one process has that holds all samples."""

from __future__ import annotations

import math
from collections import namedtuple
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpctrain as ht
from support.refusals import refused
from support.thread_ranks import on_ranks

torch = pytest.importorskip("torch")

Pair = namedtuple("Pair", "left right")
cuts = st.integers(1, 4).flatmap(lambda ranks: st.lists(st.integers(0, 12), min_size=ranks - 1, max_size=ranks - 1))


def parts_of(samples, cut):
    """Each rank's part of the samples; any of them may be empty."""
    return [samples[begin:end] for begin, end in pairwise([0, *sorted(cut), len(samples)])]


def gathered(values):
    return on_ranks(len(values), lambda comm: ht.gather(values[comm.rank], comm=comm))


def averaged(values, weights=None):
    weights = weights or [1] * len(values)
    return on_ranks(len(values), lambda comm: ht.mean(values[comm.rank], weights[comm.rank], comm=comm))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@given(cut=cuts)
def test_rows_of_all_ranks_come_in_their_order(dtype, cut):
    samples = torch.arange(24).reshape(12, 2).to(dtype)
    for joined in gathered(parts_of(samples, cut)):
        assert joined.dtype == dtype
        assert torch.equal(joined, samples)


@given(cut=cuts)
def test_arrays_and_lists_and_what_contains_them(cut):
    rows, words = np.arange(36.0).reshape(12, 3), [f"sample {number}" for number in range(12)]
    values = [
        {"rows": own, "pair": Pair(words[begin : begin + len(own)], (own[:, 0].astype(np.int8),)), "size": len(own)}
        for own, begin in zip(parts_of(rows, cut), [0, *sorted(cut)], strict=True)
    ]
    for joined in gathered(values):
        np.testing.assert_array_equal(joined["rows"], rows)
        assert isinstance(joined["pair"], Pair)
        assert joined["pair"].left == words
        assert joined["pair"].right[0].dtype == np.int8
        assert sum(joined["size"]) == 12


def test_a_rank_without_samples_takes_part():
    full = torch.ones(3, 2, requires_grad=True)
    for empty in (None, torch.empty(0), torch.empty(0, 2, dtype=torch.int64)):
        for joined in gathered([empty, full, empty]):
            assert torch.equal(joined, torch.ones(3, 2)) and not joined.requires_grad
    for joined in gathered([[], [full], []]):
        assert [piece.shape for piece in joined] == [(3, 2)]
    assert gathered([None, None]) == [None, None]


@pytest.mark.parametrize(
    "values",
    [
        [torch.ones(2, 3), torch.ones(2, 4)],
        [torch.ones(2), torch.ones(2, dtype=torch.float64)],
        [torch.ones(2), np.ones(2)],
        [{"a": 1}, {"b": 1}],
        [(1, 2), (1, 2, 3)],
        [[1], 1],
        [{"a": 1}, None, [1]],
        [{"a": {"b": torch.ones(1)}}, {"a": {"b": 1}}],
    ],
    ids=str,
)
def test_values_of_different_forms_are_refused_on_every_rank(values):
    def gather(comm):
        with refused("HT-gather-not-possible", first=0) as caught:
            ht.gather(values[comm.rank], comm=comm)
        return caught.value.message

    assert len(set(on_ranks(len(values), gather))) == 1


@given(
    cut=cuts,
    values=st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=12, max_size=12),
)
def test_weighted_mean_is_that_of_all_samples(cut, values):
    own = parts_of(values, cut)
    means = [math.fsum(part) / len(part) if part else math.nan for part in own]
    for found in averaged(means, [len(part) for part in own]):
        assert found == pytest.approx(math.fsum(values) / 12, rel=1e-12, abs=1e-9)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_metrics_over_an_evaluation_loader_are_those_of_one_process(ranks):
    # 10 samples in batches of 3: the last batch has one sample, so some ranks see fewer batches, or none of 9 to 10.
    features = torch.arange(10.0, dtype=torch.float64)
    labels = torch.tensor([0, 1] * 5)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(features, labels), batch_size=3)

    def evaluate(comm):
        seen, total, pairs = 0, 0.0, []
        for x, y in ht.shard(loader, evaluation=True, comm=comm):
            seen += len(y)
            total += x.square().sum().item()
            pairs.append((x, y))
        loss = ht.mean(total / max(seen, 1), weight=seen, comm=comm)
        x, y = (torch.cat(each) for each in zip(*ht.gather(pairs, comm=comm), strict=True))
        return loss, x, y

    for loss, x, y in on_ranks(ranks, evaluate):
        assert loss == pytest.approx(features.square().mean().item(), rel=1e-14)
        order = x.argsort()
        assert torch.equal(x[order], features) and torch.equal(y[order], labels)


@pytest.mark.parametrize(
    ("value", "weight", "code"),
    [
        (1.0, -1, "HT-argument-not-valid"),
        (1.0, math.nan, "HT-argument-not-valid"),
        (1.0, 0, "HT-argument-not-valid"),
        ("3", 1, "HT-gather-not-possible"),
        (None, 1, "HT-gather-not-possible"),
        (torch.tensor([1j]), 1, "HT-gather-not-possible"),
    ],
)
def test_what_has_no_mean(value, weight, code):
    with refused(code):
        averaged([value, value], [weight, weight])


@pytest.mark.parametrize("count", [-1.0, math.nan, math.inf])
def test_a_loss_is_divided_by_a_number(count):
    with refused("HT-argument-not-valid"):
        on_ranks(2, lambda comm: ht.mean_loss(torch.ones(()), count, comm=comm))


def test_tensorflow_and_keras():
    tf = pytest.importorskip("tensorflow")
    keras = pytest.importorskip("keras")
    values = [tf.constant([[1, 2]], tf.int8), tf.zeros((0,)), keras.Variable([[3, 4], [5, 6]], dtype="int8")]
    for joined in gathered(values):
        assert joined.dtype == np.int8
        assert joined.tolist() == [[1, 2], [3, 4], [5, 6]]
    for found in averaged([tf.constant([1.0, 2.0]), tf.Variable([4.0, 8.0])], [2, 1]):
        assert found.dtype == np.float32 and found.tolist() == [2.0, 4.0]
    assert averaged([tf.constant(1), tf.constant(2)]) == [1.5, 1.5]
    assert gathered([tf.constant(["a\0"]), tf.constant([b"b"])])[0].tolist() == [b"a\0", b"b"]

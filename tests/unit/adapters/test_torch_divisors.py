"""What a loss is divided by, against counts made by hand; and which counts of several ranks are refused."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from hpctrain.adapters.torch.denominators import Part, difference  # noqa: E402
from hpctrain.adapters.torch.divisors import Divided, divisors  # noqa: E402
from hpctrain.adapters.torch.mean_loss import mean_loss  # noqa: E402
from hpctrain.comm.single import SingleCommunicator  # noqa: E402

functional = torch.nn.functional
# 8 samples of 5 classes, of which 3 do not count.
LOGITS = torch.randn(8, 5, requires_grad=True)
LABELS = torch.tensor([0, 1, 2, 3, 4, -100, -100, -100])
WEIGHT = torch.arange(1.0, 6.0)
EACH = functional.cross_entropy(LOGITS, LABELS, reduction="none")
MASK = (LABELS >= 0).float()


@pytest.mark.parametrize(
    ("loss", "counts"),
    [
        (functional.cross_entropy(LOGITS, LABELS), [5]),
        (functional.cross_entropy(LOGITS, LABELS, weight=WEIGHT), [15]),
        (functional.nll_loss(LOGITS.log_softmax(1), LABELS), [5]),
        (functional.cross_entropy(LOGITS.T[None], LABELS[None]), [5]),
        (EACH.mean(), [8]),
        (EACH[LABELS >= 0].mean(), [5]),
        (EACH.sum() / 4, [4]),
        ((EACH * MASK).sum() / MASK.sum(), [5]),
        ((EACH * MASK).mean() / MASK.mean(), [5]),
        ((EACH * MASK).sum() * (1 / MASK.sum()), [5]),
        (functional.mse_loss(LOGITS, WEIGHT.expand(8, 5)), [40]),
        (functional.cross_entropy(LOGITS, LABELS) / 2 + 0.5 * EACH.mean(), [10, 16]),
        (functional.cross_entropy(LOGITS, LABELS, reduction="sum") / 4, [4]),
        (torch.stack([EACH.mean(), EACH[:2].mean()]).mean(), [16, 4]),
        (torch.tensor(1024.0) * EACH.mean(), [8 / 1024]),
        (EACH.mean().to(torch.float64).neg().view(1), [8]),
        (EACH.mean().mean().sum(), [8]),
        # A rank's only sample.
        ((EACH[:1] * 3).mean(), [1]),
        ((EACH[:1] * MASK[:1] * 3).sum() / 3, [3]),
    ],
)
def test_the_counts_of_losses(loss, counts):
    assert sorted(part.divisor for part, _ in divisors(loss.grad_fn)) == pytest.approx(sorted(counts))


def test_a_checkpointed_loss_is_not_computed_again():
    calls = []

    def loss(logits):
        calls.append(1)
        return functional.cross_entropy(logits, LABELS) / 2.0 * torch.tensor(3.0)

    divisors(torch.utils.checkpoint.checkpoint(loss, LOGITS, use_reentrant=False).grad_fn)
    assert len(calls) == 1


def test_a_loss_over_the_ranks_is_left_out():
    found = divisors((mean_loss(EACH.sum(), 5, comm=SingleCommunicator("alone")) + EACH.mean()).grad_fn)
    assert [part.divisor for part, _ in found] == [8]


def _passes(*counts, weights=None, **settings):
    weights = weights or [1.0] * len(counts)
    return [[(Part(weight, Divided("k", count, **settings)),)] for weight, count in zip(weights, counts, strict=True)]


@pytest.mark.parametrize(
    ("everyone", "samples", "right"),
    [
        (_passes(6, 6, exact=True), 12, True),
        (_passes(5, 6, exact=True), 12, False),
        (_passes(5, 6), 12, False),
        # 7 samples over 2 ranks: 4 and 3.
        (_passes(4, 3, weights=[8 / 7, 6 / 7], exact=True), 7, True),
        (_passes(4, 4, weights=[8 / 7, 6 / 7], exact=True), 7, False),
        (_passes(40, 40, weights=[8 / 7, 6 / 7]), 7, True),  # as of a mean over parameters
        (_passes(1, 5, weights=[2.0, 0.0], exact=True), 1, True),  # the second rank has no sample
        (_passes(0, 5, exact=True), 12, False),
        (_passes(1, 1, is_sum=True), 12, False),
        (_passes(1, 1, is_sum=True), 2, True),  # divided by one's own samples
        (_passes(1 / 8, 1 / 8, is_sum=True, doubled=8.0), 12, False),
        (_passes(6 / 8, 6 / 8, is_sum=True, doubled=8.0), 12, True),
        (_passes(12, 12, is_sum=True), 12, False),
        (_passes(36, 36, is_sum=True, elements=18), 12, False),
        (_passes(6, 6, is_sum=True), 12, True),
        (_passes(math.inf, math.inf), 12, True),
    ],
)
def test_which_counts_are_refused(everyone, samples, right):
    found = difference(everyone, samples, 2)
    assert (found is None) is right


def _mixed(part, *ranks):
    """Each rank's share of the first of two mixed batches, and its samples: lam * loss + (1 - lam) * loss."""
    return [
        [
            tuple(
                Part(weight, Divided("k", count / each if each else math.inf, exact=True, bare=count))
                for each in (part(rank), 1 - part(rank))
            )
        ]
        for rank, (count, weight) in enumerate(ranks)
    ]


@pytest.mark.parametrize("lam", [(0.3, 0.8), (0.5, 0.8), (1.0, 0.25), (1.0, 0.5), (0.0, 0.7)])
def test_losses_that_each_rank_mixes_by_a_number_of_its_own(lam):
    assert difference(_mixed(lam.__getitem__, (4, 1.0), (4, 1.0)), 8, 2) is None
    assert difference(_mixed(lam.__getitem__, (4, 8 / 7), (3, 6 / 7)), 7, 2) is None
    assert difference(_mixed(lam.__getitem__, (5, 1.0), (3, 1.0)), 8, 2) is not None


def test_one_s_own_samples_and_as_many_accumulated_parts_as_ranks():
    of_each = [2 * passes for passes in _passes(8, 8, is_sum=True, exact=True)]
    assert difference(of_each, 8, 2) is None
    assert difference([2 * passes for passes in _passes(1, 1, is_sum=True, exact=True)], 8, 2) is not None
    assert difference([3 * passes for passes in _passes(8, 8, is_sum=True, exact=True)], 8, 2) is not None


def test_a_refusal_names_ranks_and_counts():
    text, hint = difference(_passes(6, 6, 5, exact=True), 18, 3)
    assert "6 on rank 0 and 5 on rank 2" in text
    assert "ht.mean_loss(total, count)" in hint

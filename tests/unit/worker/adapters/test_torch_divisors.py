"""What a loss is divided by, against counts made by hand; and which counts of several ranks are refused."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from hpctrain.worker.adapters.torch.denominators import LossPart, denominators_of, difference  # noqa: E402
from hpctrain.worker.adapters.torch.divisors import Divided, divisors  # noqa: E402
from hpctrain.worker.adapters.torch.mean_loss import mean_loss  # noqa: E402
from hpctrain.worker.adapters.torch.weights import batch_weights  # noqa: E402
from hpctrain.worker.comm.single import SingleCommunicator  # noqa: E402
from support.refusals import check  # noqa: E402

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
        ((EACH[:1] * MASK[:1] * 3).sum() / 3, [1]),
        ((EACH[:1] * WEIGHT[2:3]).sum() / 3, [3]),
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


def _passes(*counts, samples, weights=None, **settings):
    weights = weights or [1.0] * len(counts)
    parts = (
        LossPart(each, Divided("k", count, **settings), (samples,)) for each, count in zip(weights, counts, strict=True)
    )
    return [[(part,)] for part in parts]


@pytest.mark.parametrize(
    ("everyone", "right"),
    [
        (_passes(6, 6, exact=True, samples=12), True),
        (_passes(5, 6, exact=True, samples=12), False),
        (_passes(5, 6, samples=12), False),
        # 7 samples over 2 ranks: 4 and 3.
        (_passes(4, 3, weights=[8 / 7, 6 / 7], exact=True, samples=7), True),
        (_passes(4, 4, weights=[8 / 7, 6 / 7], exact=True, samples=7), False),
        (_passes(40, 40, weights=[8 / 7, 6 / 7], samples=7), True),  # as of a mean over parameters
        (_passes(1, 5, weights=[2.0, 0.0], exact=True, samples=1), True),  # the second rank has no sample
        (_passes(0, 5, exact=True, samples=12), False),
        (_passes(1, 1, is_sum=True, samples=12), False),
        (_passes(1, 1, is_sum=True, samples=2), True),  # divided by one's own samples
        (_passes(1 / 8, 1 / 8, is_sum=True, times=(8.0,), samples=12), False),
        (_passes(6 / 8, 6 / 8, is_sum=True, times=(8.0,), samples=12), True),
        (_passes(12, 12, is_sum=True, samples=12), False),
        (_passes(36, 36, is_sum=True, elements=18, samples=12), False),
        (_passes(6, 6, is_sum=True, samples=12), True),
        (_passes(math.inf, math.inf, samples=12), True),
        # Switched off on all ranks; on one of them.
        (_passes(math.inf, math.nan, exact=True, samples=12), True),
        (_passes(math.inf, math.inf, weights=[8 / 7, 6 / 7], exact=True, is_sum=True, samples=7), True),
        (_passes(math.inf, 1, is_sum=True, samples=12), False),
    ],
)
def test_which_counts_are_refused(everyone, right):
    found = difference(everyone, 2)
    assert (found is None) is right


def _mixed(samples, part, *ranks):
    """Each rank's share of the first of two mixed batches, and its samples: lam * loss + (1 - lam) * loss."""
    return [
        [
            tuple(
                LossPart(weight, Divided("k", count / each if each else math.inf, exact=True, bare=count), (samples,))
                for each in (part(rank), 1 - part(rank))
            )
        ]
        for rank, (count, weight) in enumerate(ranks)
    ]


@pytest.mark.parametrize("lam", [(0.3, 0.8), (0.5, 0.8), (1.0, 0.25), (1.0, 0.5), (0.0, 0.7)])
def test_losses_that_each_rank_mixes_by_a_number_of_its_own(lam):
    assert difference(_mixed(8, lam.__getitem__, (4, 1.0), (4, 1.0)), 2) is None
    assert difference(_mixed(7, lam.__getitem__, (4, 8 / 7), (3, 6 / 7)), 2) is None
    assert difference(_mixed(8, lam.__getitem__, (5, 1.0), (3, 1.0)), 2) is not None


def test_one_s_own_samples_and_as_many_accumulated_parts_as_ranks():
    of_each = [2 * passes for passes in _passes(8, 8, is_sum=True, exact=True, samples=8)]
    assert difference(of_each, 2) is None
    assert difference([2 * passes for passes in _passes(1, 1, is_sum=True, exact=True, samples=8)], 2) is not None
    assert difference([3 * passes for passes in _passes(8, 8, is_sum=True, exact=True, samples=8)], 2) is not None


def test_a_refusal_names_ranks_and_counts():
    found = difference(_passes(6, 6, 5, exact=True, samples=18), 3)
    assert found is not None
    check(found.error, "HT-loss-different-counts", first=6, first_rank=0, other=5, other_rank=2)


BATCH = torch.randn(6, 10)
NETWORK = torch.nn.Sequential(torch.nn.Linear(10, 5), torch.nn.Tanh(), torch.nn.Linear(5, 5))
ANCHOR = torch.randn(5, 10)


def _total(reduction="sum"):
    return functional.cross_entropy(NETWORK(BATCH), torch.arange(6) % 5, reduction=reduction)


def _tokens(samples=6, length=4):
    logits = torch.randn(samples * length, 5, requires_grad=True)
    return functional.cross_entropy(logits, torch.zeros(samples * length, dtype=torch.long), reduction="sum")


def _squares():
    return (NETWORK(BATCH) - 1).pow(2)


def _judged(losses, *, ranks=2, own=6, others=()):
    """What is found of one rank's backward passes, the same on all ranks."""
    passes = [
        tuple(LossPart(1.0, part, (own * ranks, *others)) for part, _ in divisors(loss.grad_fn)) for loss in losses
    ]
    found = difference([passes] * ranks, ranks)
    return "right" if found is None else "wrong" if found.certain else "doubtful"


@pytest.mark.parametrize(
    ("loss_of", "verdict"),
    [
        # A constant.
        (lambda: _total() * 0.02, "wrong"),
        (lambda: 1e-4 * _squares().sum(), "wrong"),
        (lambda: torch.tensor(1024.0) * (_total() * 0.02), "wrong"),
        (lambda: 3.0 * _total(), "wrong"),
        (lambda: (3.0 * _squares()).sum(), "wrong"),
        (lambda: (_squares() / 0.3).sum(), "wrong"),
        (lambda: 0.02 * _total() + 0.1 * NETWORK[0].weight.square().sum(), "wrong"),
        (lambda: _tokens() / (4 * 12), "wrong"),
        (lambda: 0.1 * (_tokens() / (4 * 12)), "wrong"),
        (lambda: _total() / 100, "wrong"),  # more than its elements
        (lambda: 0.02 * _tokens(), "wrong"),
        (lambda: (BATCH - NETWORK[2].bias[0]).pow(2).sum() * 0.3, "wrong"),
        # It may be a constant, or what the ranks count together; a weight by the samples.
        (lambda: 0.2 * (_squares() * torch.rand(6, 1)).sum(), "doubtful"),
        (lambda: (_squares() * torch.softmax(torch.rand(6, 1), 0)).sum(), "doubtful"),
        (lambda: (_squares() / torch.full((6, 1), 6.0)).sum(), "doubtful"),
        (lambda: _tokens() / 7.5, "doubtful"),
        (lambda: _squares().sum() / 100, "doubtful"),
        (lambda: _total() * (0.31 / 8), "doubtful"),
        (lambda: _total() * (2 / 6) * 0.5, "right"),
        (lambda: _squares().sum() / 12, "doubtful"),  # the samples of both ranks, or twice one's own
        (lambda: 0.5 * (_total() / 12), "doubtful"),
        (lambda: torch.tensor(1024.0) * (_squares().sum() / 12), "doubtful"),
        # The rank's own samples, elements, or tokens.
        (lambda: _total() / 6, "right"),
        (lambda: _total() * (1 / 6), "right"),
        (lambda: 0.02 * _total() / 6, "right"),
        (lambda: 0.37 * (_total() / 6) + 0.63 * _total() / 6, "right"),
        (lambda: 10 * _total() / 6, "right"),
        (lambda: _total() / 6 / 2, "right"),
        (lambda: torch.tensor(65536.0) * (0.02 * _tokens() / 24), "right"),
        (lambda: _tokens() / (6 * 3), "right"),
        (lambda: _tokens() / 48 * 2, "right"),
        (lambda: _squares().sum() / _squares().numel(), "right"),
        (lambda: (_squares() / 6).sum(), "right"),
        (lambda: (_squares().view(-1) / _squares().numel()).reshape(3, -1).sum(), "right"),
        (lambda: (0.5 * (_squares() / 6).unsqueeze(1)).sum(), "right"),
        (lambda: (_squares() * torch.rand(6, 1)).sum() / 6, "right"),
        (lambda: torch.stack([_squares().sum() / 6, 0.1 * _total() / 6]).mean(), "right"),
        # No sums over samples.
        (lambda: 0.01 * sum(each.square().sum() for each in NETWORK.parameters()), "right"),
        (lambda: NETWORK[0].weight.abs().sum(), "right"),
        (lambda: 0.01 * functional.mse_loss(NETWORK[0].weight, ANCHOR, reduction="sum"), "right"),
        (lambda: 0.01 * (NETWORK[2].weight @ NETWORK[2].weight.T - torch.eye(5)).pow(2).sum(), "right"),
        (lambda: _squares().mean(0).sum(), "right"),
        (lambda: 0.02 * (_squares().mean(dim=-2) * 3).sum(), "right"),
        (lambda: 0.02 * _squares().mean(1).sum(), "wrong"),
        (lambda: _total("mean") + 0.01 * NETWORK[0].weight.abs().sum(), "right"),
    ],
)
def test_sums_that_are_divided_by_something_else_than_the_samples(loss_of, verdict):
    assert _judged([loss_of()]) == verdict


@pytest.mark.parametrize("weight", [0, 0.0, -0.0, 1e-320, torch.tensor(0.0), torch.zeros(1)])
def test_a_loss_that_is_switched_off(weight):
    assert _judged([_total("mean") + (weight * _total()).sum()]) == "right"
    assert _judged([weight * (_total("mean") + _total())]) == "right"
    assert _judged([1024.0 * (_total() / 6 + weight * _squares().sum() * 2)]) == "right"
    assert _judged([_total() + weight * _squares().sum()]) == "wrong"
    if not isinstance(weight, torch.Tensor):
        assert _judged([torch.add(_total("mean"), _total(), alpha=weight)]) == "right"


@pytest.mark.parametrize(
    ("loss_of", "passes", "own", "verdict"),
    [
        (lambda: 0.02 * _total() / 3, 3, 6, "wrong"),
        (lambda: _total() / 3, 3, 6, "wrong"),
        (lambda: _total() / 6 / 3, 3, 6, "right"),
        (lambda: _total() / 18, 3, 6, "right"),
        (lambda: _total() * 0.25, 4, 6, "wrong"),
        # The samples, or the passes.
        (lambda: 0.02 * _tokens(3, 1) / 3, 3, 3, "doubtful"),
        (lambda: _tokens(3, 1) / 3, 3, 3, "doubtful"),
        (lambda: _tokens(3, 1) / 3 / 3, 3, 3, "right"),
    ],
)
def test_sums_of_accumulated_passes(loss_of, passes, own, verdict):
    assert _judged([loss_of() for _ in range(passes)], own=own) == verdict


@pytest.mark.parametrize("own", [2, 4, 5, 10, 20, 50])
@pytest.mark.parametrize("weight", [0.05, 0.1, 0.2, 0.25, 0.3, 0.5, 0.9, 2, 10])
def test_weights_over_one_s_own_samples_are_not_certainly_constants(own, weight):
    if weight == own:
        return  # it is multiplied by 1, and divided by nothing
    assert _judged([_tokens(own, 1) * (weight / own)], own=own) != "wrong"
    assert _judged([_tokens(own, 1) * (weight / own / 3) for _ in range(3)], own=own) != "wrong"


def test_twice_the_samples_are_not_those_of_three_ranks():
    assert _judged([_squares().sum() / 12], ranks=3) == "right"
    assert _judged([_squares().sum() / 18], ranks=3) == "wrong"


@pytest.mark.parametrize(
    ("loss_of", "verdict"),
    [
        (lambda: 0.02 * _total(), "wrong"),
        (lambda: 0.02 * _total() / 6, "right"),
        # Of the last batch, with a single sample for each rank.
        (lambda: 0.02 * (_squares()[:1].sum() / 1), "right"),
        (lambda: _squares()[:1].sum(), "right"),
    ],
)
def test_sums_of_batches_that_were_drawn_before(loss_of, verdict):
    assert _judged([loss_of()], own=1, others=(12,)) == verdict


class _Two(SingleCommunicator):
    """Two ranks that compute the same."""

    size = 2

    def allreduce(self, array, op="sum"):
        return array * 2 if op == "sum" else array

    def allgather_object(self, value):
        return [value, value]


@pytest.mark.parametrize(("divisor", "said"), [(lambda step: 100, 1), (lambda step: 100 + step, 0)])
def test_a_doubtful_divisor_that_stays_is_said_once(divisor, said, capsys):
    comm = _Two("alone")
    losses = denominators_of(comm)
    batch_weights(comm).expect([12], evaluation=False)
    for step in range(6):
        batch_weights(comm).drawn(BATCH, 12, evaluation=False)
        (_squares().sum() / divisor(step)).backward()
        losses.reaches_model()
        losses.reduces()
        losses.step_begins(torch.device("cpu"))
    assert capsys.readouterr().err.count("of 2") == said

"""Which losses of a pipeline's micro-batches are means over samples."""

from __future__ import annotations

import pytest

from support.refusals import refused

torch = pytest.importorskip("torch")

from hpctrain.worker.adapters.torch.parallel.micro_losses import MicroLosses, require_means  # noqa: E402

F = torch.nn.functional
CLASSES, LENGTH, IGNORED = 5, 4, -100


def judge(loss, sizes=(3, 3, 2), ranks=2):
    """Read the losses of micro-batches of these sizes on each rank, and judge them together."""
    torch.manual_seed(0)
    numbers = 0
    for rank in range(ranks):
        losses = MicroLosses()
        for size in sizes:
            logits = torch.randn(size, LENGTH, CLASSES, requires_grad=True)
            labels = torch.randint(CLASSES, (size, LENGTH))
            labels[:, -1] = IGNORED
            labels[: rank + 1, 0] = IGNORED
            losses.add(loss(logits, labels), size)
        # Ranks of other stages compute no losses.
        numbers = numbers + losses.numbers() + MicroLosses().numbers()
    require_means(numbers)


def flat(logits, labels, **settings):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **settings)


MEANS = {
    "tokens": lambda logits, labels: flat(logits, labels.clamp(min=0)),
    "as many ignored in each": lambda logits, labels: flat(logits[:, 1:], labels[:, 1:]),
    "squared errors": lambda logits, labels: F.mse_loss(logits, torch.zeros_like(logits)),
    "a sum over its samples": lambda logits, labels: flat(logits, labels.clamp(min=0), reduction="sum") / len(logits),
    "a sum over its elements": lambda logits, labels: (
        flat(logits, labels.clamp(min=0), reduction="sum") / labels.numel()
    ),
    "with a penalty": lambda logits, labels: flat(logits, labels.clamp(min=0)) + 0.1 * torch.ones(3).norm(),
    "sums of each sample": lambda logits, labels: logits.pow(2).sum((1, 2)).mean(),
    "one class a sample": lambda logits, labels: F.cross_entropy(logits.mean(1), labels[:, 1]),
}
OTHERS = {
    "ignored tokens": flat,
    "weighted classes": lambda logits, labels: flat(
        logits, labels.clamp(min=0), weight=torch.linspace(0.5, 2, CLASSES)
    ),
    "a bare sum": lambda logits, labels: flat(logits, labels, reduction="sum"),
    "a sum times a constant": lambda logits, labels: 0.02 * flat(logits, labels, reduction="sum"),
    "a sum of its own": lambda logits, labels: logits.pow(2).sum(),
    "one of two": lambda logits, labels: F.mse_loss(logits, torch.zeros_like(logits)) + flat(logits, labels),
}


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("sizes", [(3, 3), (3, 3, 2), (1, 1)])
def test_means_over_samples_are_taken(name, sizes):
    judge(MEANS[name], sizes)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_mean_over_samples_is_refused(name):
    sums = name.startswith("a ")
    with refused("HT-pipeline-loss-not-mean" if sums else "HT-pipeline-different-counts"):
        judge(OTHERS[name])


def test_a_single_rank_is_judged_too():
    with refused("HT-pipeline-different-counts"):
        judge(flat, sizes=(3, 1), ranks=1)

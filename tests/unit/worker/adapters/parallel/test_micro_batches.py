"""What a rank of a pipeline computes of a batch; and losses that are no means over samples are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from hpctrain.common.errors import HpctrainError  # noqa: E402
from hpctrain.worker.adapters.torch.batch import BatchTensor, Rows  # noqa: E402
from hpctrain.worker.adapters.torch.parallel.stages import MeanLosses, part_of  # noqa: E402

Loss = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]

WEIGHTS = torch.tensor([0.1, 2.0, 5.0], dtype=torch.float64)


def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target.masked_fill(target == 0, -100))


def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def penalised(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target) + 3.0


def random(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.dropout(output, 0.5), target)


def _check(loss: Loss, sizes: list[int], dtype: torch.dtype = torch.float64, of_a_batch: int = 8) -> None:
    torch.manual_seed(0)
    check = MeanLosses(loss)
    for number, size in enumerate(sizes):
        if number % of_a_batch == 0:
            check.begin()
        output, target = torch.randn(size, 3, dtype=dtype), torch.randint(0, 3, (size,))
        check.check(output, target)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[4, 4, 4], [1, 1, 1, 1], [5, 2]])
@pytest.mark.parametrize("of_a_batch", [1, 8])
@pytest.mark.parametrize("loss", [F.cross_entropy, penalised, random])
def test_means_over_samples_pass(loss: Loss, of_a_batch: int, sizes: list[int], dtype: torch.dtype) -> None:
    _check(loss, sizes, dtype, of_a_batch)


def test_losses_of_different_batches_are_not_compared() -> None:
    """A GPT's head is in its loss, and an update changed it in between."""
    head = torch.ones(3)
    check = MeanLosses(lambda output, target: F.cross_entropy(output * head, target))
    for _ in range(4):
        check.begin()
        output, target = torch.randn(4, 3), torch.randint(0, 3, (4,))
        check.check(output, target)
        head += 1


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target: F.cross_entropy(output, target, reduction="sum"),
        lambda output, target: F.cross_entropy(output, target, weight=WEIGHTS),
        lambda output, target: F.cross_entropy(output, target).sqrt(),
        masked,
        contrastive,
    ],
)
@pytest.mark.parametrize(
    ("sizes", "of_a_batch"), [([4] * 8, 8), ([1] * 8, 8), ([5, 2] * 4, 8), ([4] * 8, 1), ([5] * 8, 1)]
)
def test_other_losses_are_refused(loss: Loss, sizes: list[int], of_a_batch: int) -> None:
    with pytest.raises(HpctrainError) as caught:
        _check(loss, sizes, of_a_batch=of_a_batch)
    assert caught.value.code == "HT-pipeline-loss-not-mean"


class _Ranks:
    """Of some data ranks, which have a batch in common, one."""

    def __init__(self, whole, rank, size):
        self._whole, self.rank, self.size = whole, rank, size

    def gather(self, own, sizes, dim, name=""):
        return self._whole


def parts(whole, sizes, target=None):
    """The parts of all ranks of a batch of rows with these sizes."""
    found = []
    for rank in range(len(sizes)):
        rows = Rows(_Ranks(whole, rank, len(sizes)), tuple(sizes))
        batch = BatchTensor(whole[rows.begin : rows.begin + rows.size], rows)
        found.append(part_of(batch, batch if target is None else target))
    return found


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (4, 1, 2), (0, 5), (5, 0, 0, 1), (1, 0), (0, 0, 2)])
@pytest.mark.parametrize("plain", [False, True])
def test_the_mean_over_ranks_of_weighted_means_is_that_of_the_batch(sizes, plain):
    whole = torch.arange(float(sum(sizes))) ** 2
    found = parts(whole, sizes, whole if plain else None)
    means = [part.weight * float(part.inputs.mean()) for part in found]
    assert sum(means) / len(sizes) == pytest.approx(float(whole.mean()))
    assert all(torch.equal(part.inputs, part.target) and type(part.target) is torch.Tensor for part in found)


def test_a_batch_of_fewer_samples_than_ranks_is_computed_by_each():
    assert [(len(part.inputs), part.weight) for part in parts(torch.zeros(2), (1, 1, 0))] == [(2, 1)] * 3

"""What each rank of a pipeline computes of a batch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hpctrain.worker.adapters.torch.batch import BatchTensor, Rows  # noqa: E402
from hpctrain.worker.adapters.torch.parallel.stages import part_of  # noqa: E402


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

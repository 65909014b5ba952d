"""What each rank makes of a batch's samples, without starting ranks."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple

import pytest

from support.refusals import refused

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch.nn.utils.rnn import pack_sequence, pad_sequence  # noqa: E402

from hpctrain.worker.adapters.data_ranks import DataPlace  # noqa: E402
from hpctrain.worker.adapters.same_data import leaves  # noqa: E402
from hpctrain.worker.adapters.torch.batch import BatchTensor  # noqa: E402
from hpctrain.worker.adapters.torch.collation import Collation, changed, joined  # noqa: E402
from hpctrain.worker.comm.single import SingleCommunicator  # noqa: E402

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    name: str = "all"


def samples(count: int = 7) -> list:
    """Sequences of different lengths, with a number."""
    return [(torch.arange(1.0, 2 + number % 4), number) for number in range(count)]


def numbers(batch) -> torch.Tensor:
    return torch.tensor([number for _, number in batch])


def padded(batch):
    return pad_sequence([x for x, _ in batch], batch_first=True), numbers(batch)


def sequence_first(batch):
    return {"x": pad_sequence([x for x, _ in batch]), "y": [numbers(batch)]}


def two_views(batch):
    x, y = padded(batch)
    return Pair(torch.cat([x, -x]), y)


def without_some(batch):
    return padded([each for each in batch if each[1] != 2])


def of_different_lengths(batch):
    return [x for x, _ in batch], numbers(batch)


def packed(batch):
    return pack_sequence([x for x, _ in batch], enforce_sorted=False), numbers(batch)


def one_after_the_other(batch):
    return torch.cat([x for x, _ in batch]), numbers(batch)


def matrix(batch):
    y = numbers(batch)
    return y[:, None] == y, y


def of_a_class(batch):
    return UserDict(
        record=Record(numbers(batch)), array=np.zeros(len(batch)), none=None, sparse=torch.eye(3).to_sparse()
    )


def joined_parts(collate, count: int, ranks: int, **settings) -> list:
    """What each rank gives the script."""
    made = []
    for rank in range(ranks):
        place = DataPlace(rank, ranks)
        comm = SingleCommunicator("test")
        comm.rank, comm.size = place
        collation = Collation(collate, by_sample=settings.get("by_sample", False))
        part = collation(samples(count)[collation.fetched(count, place)], count, place)
        # As PyTorch's pinning gives them.
        pinned = {path: [dim, list(sizes)] for path, (dim, sizes) in part.sizes.items()}
        made.append(joined(part._replace(sizes=pinned), comm))
    return made


def whole(parts: list[torch.Tensor]) -> torch.Tensor:
    """The tensor of which these are what the ranks have."""
    if not isinstance(parts[0], BatchTensor):
        assert all(torch.equal(each.to_dense(), parts[0].to_dense()) for each in parts)
        return parts[0]
    made = torch.cat([each.local for each in parts], parts[0].rows.dim)
    assert all(each.shape == made.shape and each.local.is_contiguous() for each in parts)
    assert all(each.rows.sizes == tuple(own.local.shape[own.rows.dim] for own in parts) for each in parts)
    return made


@pytest.mark.parametrize(
    ("collate", "divided"),
    [
        (padded, 2),
        (sequence_first, 2),
        (two_views, 2),
        (without_some, 2),
        (of_different_lengths, 1),
        (packed, 1),
        (one_after_the_other, 1),
        (matrix, 1),
        (of_a_class, 1),
    ],
)
@pytest.mark.parametrize("count", [7, 2, 1])
def test_a_batch_of_any_collate_fn_is_that_of_one_process(collate, divided, count):
    alone = list(leaves(collate(samples(count))))
    parts = [list(leaves(each)) for each in joined_parts(collate, count, 3)]
    found = 0
    for number, (path, leaf) in enumerate(alone):
        each = [part[number][1] for part in parts]
        assert {part[number][0] for part in parts} == {path}
        if isinstance(leaf, torch.Tensor):
            found += isinstance(each[0], BatchTensor)
            together = whole(each)
            assert torch.equal(together.to_dense(), leaf.to_dense()), path
    # With few samples no two of different lengths show that a dimension does not count them.
    assert found == divided or count < 3


def test_ranks_collate_their_own_samples_where_each_is_treated_by_itself():
    seen = []

    def collate(batch):
        seen.append(len(batch))
        return torch.stack([torch.full((2,), float(number)) for _, number in batch])

    parts = joined_parts(collate, 7, 3, by_sample=True)
    assert whole(parts).tolist() == [[number] * 2 for number in range(7)]
    assert [each for each in seen if each not in (2, 5)] == [3] and max(seen) == 5
    assert [each.local.shape for each in joined_parts(collate, 1, 2, by_sample=True)] == [(1, 2), (0, 2)]
    # More rows than of these samples, and what the ranks cannot put together.
    for wrong in (lambda batch: torch.zeros(len(batch) + (len(batch) == 3)), packed, of_a_class):
        with refused("HT-loader-not-by-sample"):
            joined_parts(wrong, 7, 3, by_sample=True)


def test_containers_keep_their_types():
    batch = UserDict(pair=Pair([1], (2, 3)), record=Record(torch.ones(1)), texts=["a", "b"])
    made = changed(batch, lambda path, leaf: (path, leaf) if not isinstance(leaf, torch.Tensor) else leaf + 1)
    assert type(made) is UserDict and made["pair"] == Pair(
        [("['pair'][0][0]", 1)], (("['pair'][1][0]", 2), ("['pair'][1][1]", 3))
    )
    assert made["record"].x.item() == 2 and made["record"].name == ("['record']['name']", "all")
    assert made["texts"] == ("['texts']", ["a", "b"]) and batch["record"].x.item() == 1

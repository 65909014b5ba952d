"""How the rows of a tensor are divided over the data ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hpctrain.worker.adapters.torch.batch.ranks import DataRanks


class Rows(NamedTuple):
    """The division of one dimension of a tensor: each data rank holds a contiguous part, in the order of the ranks.

    Attributes:
        ranks: the data ranks.
        sizes: how many rows each of them holds.
        dim: the dimension that is divided, at least 0.
    """

    ranks: DataRanks
    sizes: tuple[int, ...]
    dim: int = 0

    @property
    def total(self) -> int:
        """The rows of all ranks."""
        return sum(self.sizes)

    @property
    def size(self) -> int:
        """The rows of this rank."""
        return self.sizes[self.ranks.rank]

    @property
    def begin(self) -> int:
        """This rank's first row."""
        return sum(self.sizes[: self.ranks.rank])

    def along(self, dim: int) -> Rows:
        """The same parts of another dimension."""
        return self if dim == self.dim else Rows(self.ranks, self.sizes, dim)

    def sized(self, sizes: Iterable[int]) -> Rows:
        """Parts of other sizes of the same dimension."""
        return Rows(self.ranks, tuple(sizes), self.dim)

    def even(self) -> Rows:
        """The same rows, divided as evenly as possible, the first ranks having one more."""
        least, more = divmod(self.total, self.ranks.size)
        return self.sized(least + (rank < more) for rank in range(self.ranks.size))

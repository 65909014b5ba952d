"""What a model returns, and along which dimension it has rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from hpctrain.worker.adapters.torch.batch.rows import Rows

# Results that say nothing about rows.
_CONSTANTS = (str, bytes, bool, torch.dtype, torch.device)


class Result(NamedTuple):
    """A part of what a model returned, but for constants."""

    value: Any

    @property
    def shape(self) -> torch.Size | None:
        """The shape of a tensor; None for anything else."""
        return self.value.shape if isinstance(self.value, torch.Tensor) else None

    def dims(self, rows: Rows) -> tuple[int, ...] | None:
        """The dimensions that may be those of the rows, by their length; None for what has no rows."""
        shape = self.shape
        if shape is None:
            return None
        return tuple(dim for dim, size in enumerate(shape) if size == rows.size) or None


def results_of(returned: Any, *, whole_losses: bool) -> list[Result]:
    """The parts of what a model returned, in an order that is the same on every rank.

    Args:
        whole_losses: whether the model added its losses up over the ranks itself, so that numbers need no rows.
    """
    return [Result(each) for each in tree_leaves(returned) if not _is_constant(each, whole_losses)]


def _is_constant(value: Any, whole_losses: bool) -> bool:
    if value is None or isinstance(value, _CONSTANTS):
        return True
    if isinstance(value, torch.Tensor):
        return whole_losses and value.dim() == 0
    # The keys and values that a language model keeps for its next call go back to it as they are.
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(value).__mro__)


def agreed_dims(
    found: Sequence[Sequence[tuple[int, ...] | None]], *, first: int, others: int, even: bool
) -> tuple[int, ...] | None:
    """The dimension of the rows of each result, from what all ranks found; None where a result has no such dimension.

    Ranks have different numbers of rows where a batch does not divide evenly, which rules coincidences out: a result
    with two such dimensions has a number for each pair of rows.

    Args:
        found: for each rank and result, the dimensions that are as long as the rank has rows.
        first: of several possible dimensions, that of the first result.
        others: that of further ones.
        even: whether all ranks have as many rows.
    """
    dims: list[int] = []
    for number, results in enumerate(zip(*found, strict=True)):
        if any(each is None for each in results):
            return None
        common = set(results[0] or ()).intersection(*(each or () for each in results))
        if not common or (len(common) > 1 and not even):
            return None
        usual = others if number else first
        dims.append(usual if usual in common else min(common))
    return tuple(dims)

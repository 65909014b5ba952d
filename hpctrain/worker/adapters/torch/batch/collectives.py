"""Steps between plain tensors, which all ranks hold, and rows, which the ranks divide, with gradients of any order.

The gradient of a plain tensor is the mean over the ranks of what each of them has, and each rank has the true gradient
of its rows times the number of ranks. With these two conventions the mean over the ranks of a parameter's gradient,
which the reducer computes, is that of one process. They decide the factors below: a sum over the ranks (S) of each
rank's number s_r has dL/ds_r = dL/dS = mean of the G_r, and so s_r gets N x that mean, the sum of the G_r.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hpctrain.worker.adapters.torch.batch.ranks import DataRanks, Rows


def sum_over_ranks(
    own: torch.Tensor, ranks: DataRanks, name: str = "a sum", divisor: torch.Tensor | float = 1
) -> torch.Tensor:
    """The sum over the data ranks of a tensor that each computed from its rows: a plain tensor.

    Args:
        divisor: what the sum is divided by: a number, or a tensor of one number, which is added up with the other.
    """
    if isinstance(divisor, torch.Tensor):
        total, divisor = ranks.ratio(own, divisor, name)
    else:
        total = ranks.sum(own, name)
        total = total if divisor == 1 else total / divisor
    if own.requires_grad and torch.is_grad_enabled():
        return _apply_sum(own, [total], Added(own, ranks, name, divisor))
    return total


def gathered(own: torch.Tensor, rows: Rows, name: str = "gathered rows") -> torch.Tensor:
    """The rows of all ranks: a plain tensor."""
    if own.requires_grad and torch.is_grad_enabled():
        return _Gather.apply(own, rows, name)  # type: ignore[no-untyped-call, no-any-return]
    return rows.ranks.gather(own, rows.sizes, rows.dim, name)


def own_rows(whole: torch.Tensor, rows: Rows) -> torch.Tensor:
    """This rank's rows of a plain tensor."""
    if whole.requires_grad and torch.is_grad_enabled():
        return _Cut.apply(whole, rows)  # type: ignore[no-untyped-call, no-any-return]
    return whole.narrow(rows.dim, rows.begin, rows.size)


def spread(plain: torch.Tensor, ranks: DataRanks) -> torch.Tensor:
    """A plain tensor for use with rows: its gradient is made that of all ranks' rows.

    Parameters that a reducer handles need not be spread: their gradients are averaged later, together.
    """
    if plain.requires_grad and torch.is_grad_enabled():
        return _Spread.apply(plain, ranks)  # type: ignore[no-untyped-call, no-any-return]
    return plain


def mean_over_ranks(own: torch.Tensor, ranks: DataRanks) -> torch.Tensor:
    """The mean over the data ranks of the gradients that they have for one plain tensor: its true gradient."""
    return sum_over_ranks(own, ranks, "a gradient", ranks.size)


class Added(NamedTuple):
    """A tensor that was added up over the ranks, how it is named in messages, and what the sum was divided by."""

    own: torch.Tensor
    ranks: DataRanks
    name: str
    divisor: torch.Tensor | float


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, total: list[torch.Tensor], added: Added) -> torch.Tensor:
        ctx.added = added
        return total[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        _, ranks, name, divisor = ctx.added
        return sum_over_ranks(gradient, ranks, f"the gradient of {name}") / divisor, None, None


# Without what Function.apply does for functorch, whose tensors have no numbers to add up.
_apply_sum: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Sum).apply


def added_to(total: Any) -> Added | None:
    """What was added up to give this tensor, unless the script sees its gradient."""
    node: Any = getattr(total, "grad_fn", None)
    of_sum = isinstance(node, _Sum._backward_cls)
    if not of_sum or total._backward_hooks or total.retains_grad:
        return None
    added: Added = node.added
    return added


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plain: torch.Tensor, ranks: DataRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return plain.view_as(plain)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return mean_over_ranks(gradient, ctx.ranks), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, rows: Rows, name: str) -> torch.Tensor:
        ctx.rows = rows
        return rows.ranks.gather(own, rows.sizes, rows.dim, name)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return own_rows(sum_over_ranks(gradient, ctx.rows.ranks, "the gradient of rows"), ctx.rows), None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        return whole.narrow(rows.dim, rows.begin, rows.size)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        rows = ctx.rows
        return gathered(gradient, rows, "the gradient of rows") / rows.ranks.size, None

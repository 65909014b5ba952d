"""The cross entropy of an output layer with many classes, without the logits of a whole batch.

The logits of 12 windows of 1,024 tokens and 50,304 classes take 2.5 GB in float32, their logarithms and gradients as
much again. Here the output layer and its loss are computed for some rows at a time, with the gradients, as Liger-Kernel
does it (Hsu et al. 2024, arXiv 2410.10989, section 3.2). PyTorch's own ``linear_cross_entropy`` (2.13) returns the sum
in bf16, which has 8 bits, where its inputs are that, and smooths no labels in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hpctrain.common.recipes.loss_chunks import chunk_rows
from hpctrain.worker.data.samples import NO_LABEL

# Of logits, labels and smoothing.
OfLogits = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


def chunked_loss(
    labels: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    smoothing: float = 0.0,
    of_logits: OfLogits | None = None,
) -> torch.Tensor:
    """The sum that :meth:`hpctrain.worker.train.torch_forward.TorchLoss.sum` gives, of an output layer without a bias.

    Args:
        labels: int64, shape (N,), as many as there are rows of ``hidden``.
        hidden: shape (…, width), what the output layer gets.
        weight: shape (classes, width).
        of_logits: what computes loss and gradient of a chunk, :func:`chunk_gradient` or that compiled.
    """
    rows = _rows(hidden, weight)
    of_logits = of_logits or chunk_gradient
    return _ChunkedLoss.apply(*rows, labels, smoothing, of_logits)  # type: ignore[no-untyped-call,no-any-return]


@torch.no_grad()
def chunked_score(
    labels: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the cross entropy without smoothing, and the number of labels that have the largest logit."""
    losses, correct = [], []
    for rows, own, whole in _chunks(*_rows(hidden, weight), labels):
        logits = rows @ whole.T
        correct.append((logits.argmax(dim=1) == own).sum())
        losses.append(_losses(_wide(logits), own, 0.0)[0])
    return torch.cat(losses).sum(), torch.stack(correct).sum()


def _rows(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows in the type that a matrix product has here, with the weight as it is."""
    device = hidden.device.type
    computed_in = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    return hidden.flatten(0, -2).to(computed_in), weight


def _chunks(hidden: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Equal parts of the rows and of others like them, each with the weight in the rows' type."""
    weight = weight.to(hidden.dtype)
    size = chunk_rows(len(hidden), len(weight), on_gpu=hidden.is_cuda)
    for rows in zip(*(each.split(size) for each in (hidden, *others)), strict=True):
        yield *rows, weight


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradients ahead, in the forward pass; a backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        smoothing: float,
        of_logits: OfLogits,
    ) -> torch.Tensor:
        of_hidden = torch.empty_like(hidden)
        # Sums over the chunks, which 16 bits would round each time.
        of_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        losses = []
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, own, gradient, whole in _chunks(hidden, weight, labels, of_hidden):
                each, logits = of_logits(rows @ whole.T, own, smoothing)
                losses.append(each)
                torch.mm(logits, whole, out=gradient)
                _add_product(of_weight, logits.T, rows)
        ctx.save_for_backward(of_hidden, of_weight.to(weight.dtype))
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return *(each * gradients[0] if asked else None for each, asked in needed), None, None, None


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a product to a sum. Into a wider type only NVIDIA's GPUs add it without rounding it first."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda and torch.version.hip is None:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _losses(wide: torch.Tensor, labels: torch.Tensor, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row, and the logarithm of the sum of its exponentials."""
    total = wide.logsumexp(dim=1)
    own = wide.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    spread = smoothing * wide.mean(dim=1) if smoothing else 0.0
    return torch.where(labels == NO_LABEL, 0.0, total - (1 - smoothing) * own - spread), total


def chunk_gradient(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row, and the gradient of their sum by the logits, in the logits' type and perhaps memory."""
    wide = _wide(logits)
    losses, total = _losses(wide, labels, smoothing)
    known = (labels != NO_LABEL)[:, None].to(wide.dtype)
    if torch.compiler.is_compiling():
        # One pass over the logits. For a scatter, the compiler would write them in float32 and read them again; and of
        # logits that change in place, PyTorch 2.11 computes the losses afterwards.
        is_label = torch.arange(wide.shape[1], device=wide.device) == labels[:, None]
        wide = (wide - total[:, None]).exp() - smoothing / wide.shape[1]
        wide = torch.where(is_label, wide - (1 - smoothing), wide) * known
    else:
        wide = wide.sub_(total[:, None]).exp_()
        if smoothing:
            wide = wide.sub_(smoothing / wide.shape[1])
        wide = wide.scatter_add_(1, labels.clamp(min=0)[:, None], (smoothing - 1) * torch.ones_like(known)).mul_(known)
    return losses, wide.to(logits.dtype)

"""What a loss is divided by, as its autograd graph tells: from the loss down to the sums and means in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from hpctrain.adapters.torch.mean_loss import OVER_RANKS

# Graphs of scalars are small; a list of a thousand losses that are added up need not be read to its end.
_MOST_NODES = 300
_PASSED = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("Add", "Alias", "Cat", "Clamp", "Clone", "Expand", "NanToNum", "Neg", "ReshapeAlias", "Select", "Squeeze"),
        *("Stack", "Sub", "ToCopy", "UnsafeView", "Unsqueeze", "View", "Where"),
    )
    for number in (0, 1)
)
_LISTS = ("StackBackward0", "CatBackward0")
# Counts that went through float32, as means of masks do.
ROUNDING = 2e-6


class Divided(NamedTuple):
    """A part of a loss.

    Attributes:
        kind: what it is, for messages.
        divisor: what the sum over its elements is divided by.
        elements: that are added up; 0 where it is not known.
        exact: it certainly depends on the samples.
        is_sum: it is a sum, and not a mean.
        doubled: the powers of two by which it was multiplied, as a GradScaler does.
        bare: the divisor without the numbers that it was multiplied by.
    """

    kind: str
    divisor: float
    elements: int = 0
    exact: bool = False
    is_sum: bool = False
    doubled: float = 1.0
    bare: float = math.nan

    @property
    def is_scaled_by_chance(self) -> bool:
        """Whether it was multiplied by a number that is no count and no reciprocal of one, as mixup's is."""
        factor = self.bare / self.divisor if self.divisor else math.inf
        number = max(factor, 1 / factor) if 0 < factor < math.inf else 0.5
        return not math.isclose(number, round(number), rel_tol=ROUNDING)


class _Place(NamedTuple):
    node: Any
    divisor: float
    bare: float
    doubled: float

    def over(self, count: float, node: Any) -> _Place:
        """The place of what is divided by a count."""
        return _Place(node, self.divisor * count, self.bare * count, self.doubled)


def divisors(root: torch.autograd.graph.Node) -> list[tuple[Divided, torch.autograd.graph.Node]]:
    """The parts that a loss is the sum of, and their nodes. Those that :func:`hpctrain.mean_loss` made are left out."""
    found: list[tuple[Divided, torch.autograd.graph.Node]] = []
    waiting, seen = [_Place(root, 1.0, 1.0, 1.0)], 0
    while waiting and seen < _MOST_NODES:
        place = waiting.pop()
        seen += 1
        name = place.node.name()
        if name == OVER_RANKS:
            continue
        following = list(_below(place, name))
        if following:
            waiting += following
        elif (part := _part(place, name)) is not None:
            found.append((part, place.node))
    return found


def _below(place: _Place, name: str) -> Iterator[_Place]:
    """The scalars that a scalar was computed from."""
    node = place.node
    below = [each for each, _ in node.next_functions]
    kind = name.removesuffix("Backward0").removesuffix("Backward1")
    if kind == "Div" and below[0] is not None:
        known = None if len(below) > 1 and below[1] is not None else _number(_saved(node, "other"))
        yield place.over(1.0 if known is None else known, below[0])
    elif kind == "Mul":
        yield from _factors(place, below)
    elif name in ("MeanBackward0", "SumBackward0"):
        elements = _elements(node)
        # Not of one element: that may be a rank's only sample.
        if below[0] is not None and (_is_scalar(node) or below[0].name() in _LISTS):
            yield place.over(elements if name == "MeanBackward0" else 1, below[0])
    elif name in _PASSED:
        alpha = abs(float(getattr(node, "_saved_alpha", 1)))
        for index, each in enumerate(below):
            if each is not None:
                yield place._replace(node=each, divisor=place.divisor / (alpha if index and alpha else 1))


def _factors(place: _Place, below: list[Any]) -> Iterator[_Place]:
    node, divisor, doubled = place.node, place.divisor, place.doubled
    present = [each for each in below if each is not None]
    if len(present) > 1:  # such as a loss with a trained weight, equal on all ranks
        yield from (place._replace(node=each) for each in present)
        return
    factor = _number(_saved(node, "other" if below[0] is not None else "self"))
    if factor is None:
        factor = 1.0
    if factor >= 2 and math.frexp(factor)[0] == 0.5:
        doubled *= factor
    yield _Place(present[0], divisor / factor if factor else math.inf, place.bare, doubled)


def _part(place: _Place, name: str) -> Divided | None:
    node, divisor, bare, doubled = place
    is_likelihood = hasattr(node, "_raw_saved_total_weight")
    reduction = getattr(node, "_saved_reduction", None)
    if is_likelihood and reduction == 1:
        weight = _number(_saved(node, "total_weight"))
        if weight is None:
            return None
        kind = "the number of targets that count, or their weight,"
        return Divided(kind, divisor * weight, exact=True, bare=bare * weight)
    target = _saved(node, "target") if is_likelihood else None
    elements = _elements(node) if target is None else target.numel()
    if name in ("MeanBackward0", "MeanBackward1") or reduction == 1:
        return Divided("the number of elements of a mean", divisor * elements, elements, bare=bare * elements)
    if reduction == 2 or name in ("SumBackward0", "SumBackward1"):
        exact = reduction == 2
        return Divided("the divisor of a sum", divisor, elements, exact, is_sum=True, doubled=doubled, bare=bare)
    return Divided("the divisor", divisor, bare=bare) if divisor != 1 else None


def _saved(node: Any, name: str) -> Any:
    """What a node keeps for its backward pass; None where it is packed: a checkpoint would compute it again."""
    kept = getattr(node, f"_raw_saved_{name}", None)
    return None if getattr(kept, "unpack_hook", None) is not None else getattr(node, f"_saved_{name}")


def _is_scalar(node: Any) -> bool:
    """Whether what a node reduces has no dimensions."""
    below, index = node.next_functions[0]
    return not below._input_metadata[index].shape


def _elements(node: Any) -> int:
    """How many elements the tensor has that a node reduces."""
    below, index = node.next_functions[0] if node.next_functions else (None, 0)
    return 0 if below is None else math.prod(below._input_metadata[index].shape)


def _number(value: Any) -> float | None:
    """The absolute value of a number or of a tensor of one; None for anything else."""
    if isinstance(value, torch.Tensor):
        return abs(float(value)) if value.numel() == 1 else None
    return abs(float(value)) if isinstance(value, int | float) else None

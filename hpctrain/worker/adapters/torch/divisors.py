"""What a loss is divided by, as its autograd graph tells: from the loss down to the sums and means in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from hpctrain.worker.adapters.torch.mean_loss import OVER_RANKS

# Graphs of scalars are small. Of a thousand losses that are added up, the first ones are enough.
_MOST_NODES = 300
_PASSED = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("Add", "Alias", "Cat", "Clamp", "Clone", "Expand", "NanToNum", "Neg", "ReshapeAlias", "Select", "Squeeze"),
        *("Stack", "Sub", "ToCopy", "UnsafeView", "Unsqueeze", "View", "Where"),
    )
    for number in (0, 1)
)
_RESHAPED = ("Alias", "Clone", "ReshapeAlias", "Squeeze", "ToCopy", "UnsafeView", "Unsqueeze", "View")
_LISTS = ("StackBackward0", "CatBackward0")
# Operations that penalties on parameters consist of, and those that are applied to means over samples.
_ELEMENTWISE = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("Abs", "Add", "Clamp", "ClampMin", "Clone", "Div", "Exp", "Log", "Maximum", "Mul", "Neg", "Permute", "Pow"),
        *("Relu", "ReshapeAlias", "Select", "Sigmoid", "Slice", "Softplus", "Sqrt", "Squeeze", "Sub", "Sum", "T"),
        *("Tanh", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View"),
    )
    for number in (0, 1)
)
_PRODUCTS = ("MmBackward0", "BmmBackward0")
_ACCUMULATE = "torch::autograd::AccumulateGrad"
# The relative error of counts that were computed in float32, as means of masks are.
ROUNDING = 2e-6


class Divided(NamedTuple):
    """A part of a loss.

    Attributes:
        kind: a noun phrase for messages.
        divisor: what the sum over its elements is divided by.
        elements: how many elements are added up; 0 where that is unknown.
        exact: whether it certainly depends on the samples.
        is_sum: whether it is a sum over samples, and not a mean.
        over: the numbers that it was divided by, one by one.
        times: the numbers that it was multiplied by.
        bare: the divisor without the numbers that it was multiplied by.
        weighted: whether the elements were multiplied or divided by a tensor before they were added up.
    """

    kind: str
    divisor: float
    elements: int = 0
    exact: bool = False
    is_sum: bool = False
    over: tuple[float, ...] = ()
    times: tuple[float, ...] = ()
    bare: float = math.nan
    weighted: bool = False

    @property
    def unscaled(self) -> float:
        """The divisor without the powers of two that it was multiplied by, as a GradScaler does."""
        return self.divisor * math.prod(each for each in self.times if is_doubling(each))

    @property
    def is_off(self) -> bool:
        """Whether its weight is 0, or so small that it has no reciprocal: an auxiliary loss that is switched off."""
        return not math.isfinite(self.divisor)

    @property
    def is_scaled_by_chance(self) -> bool:
        """Whether it was multiplied by a number that is no count and no reciprocal of one, as mixup's is."""
        factor = self.bare / self.divisor if self.divisor else math.inf
        number = max(factor, 1 / factor) if 0 < factor < math.inf else 0.5
        return not math.isclose(number, round(number), rel_tol=ROUNDING)


def is_doubling(factor: float) -> bool:
    """Whether it is a power of two, of at least 2."""
    return 2 <= factor < math.inf and math.frexp(factor)[0] == 0.5


class _Place(NamedTuple):
    node: Any
    divisor: float = 1.0
    bare: float = 1.0
    over: tuple[float, ...] = ()
    times: tuple[float, ...] = ()

    def divided(self, count: float, node: Any) -> _Place:
        """The place of what is divided by a count."""
        return _Place(node, self.divisor * count, self.bare * count, (*self.over, count), self.times)

    def multiplied(self, factor: float, node: Any) -> _Place:
        """The place of what is multiplied by a number."""
        divisor = self.divisor / factor if factor else math.inf
        return self._replace(node=node, divisor=divisor, times=(*self.times, factor))


def divisors(root: torch.autograd.graph.Node) -> list[tuple[Divided, torch.autograd.graph.Node]]:
    """The parts that a loss is the sum of, and their nodes. Those that :func:`hpctrain.mean_loss` made are left out."""
    found: list[tuple[Divided, torch.autograd.graph.Node]] = []
    waiting, seen = [_Place(root)], 0
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
        yield place._replace(node=below[0]) if known is None else place.divided(known, below[0])
    elif kind == "Mul":
        yield from _factors(place, below)
    elif name in ("MeanBackward0", "SumBackward0"):
        elements = _elements(node)
        # Not of one element: that may be a rank's only sample.
        if below[0] is not None and (_is_scalar(node) or below[0].name() in _LISTS):
            is_mean = name == "MeanBackward0"
            yield place.divided(elements, below[0]) if is_mean else place._replace(node=below[0])
    elif name in _PASSED:
        alpha = abs(float(getattr(node, "_saved_alpha", 1)))
        for index, each in enumerate(below):
            if each is not None:
                yield place.multiplied(alpha, each) if index and alpha != 1 else place._replace(node=each)


def _factors(place: _Place, below: list[Any]) -> Iterator[_Place]:
    node = place.node
    present = [each for each in below if each is not None]
    if len(present) > 1:  # such as a loss with a trained weight, equal on all ranks
        yield from (place._replace(node=each) for each in present)
        return
    factor = _number(_saved(node, "other" if below[0] is not None else "self"))
    yield place._replace(node=present[0]) if factor is None else place.multiplied(factor, present[0])


def _part(place: _Place, name: str) -> Divided | None:
    node, divisor, bare, *_ = place
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
    if (reduction == 2 or name in ("SumBackward0", "SumBackward1")) and _is_of_samples(node):
        place, weighted = _each_element(place) if reduction is None else (place, False)
        return Divided(
            "the divisor of a sum",
            place.divisor,
            elements,
            reduction == 2,
            True,
            place.over,
            place.times,
            place.bare,
            weighted=weighted,
        )
    return Divided("the divisor", divisor, bare=bare) if divisor != 1 else None


def _each_element(place: _Place) -> tuple[_Place, bool]:
    """The place of a sum whose elements are divided or multiplied by numbers before they are added up, as if the sum
    was; and whether they are by a tensor, which may be their weights.
    """
    node: Any = place.node.next_functions[0][0]
    while node is not None:
        kind = node.name().removesuffix("Backward0").removesuffix("Backward1")
        below = [each for each, _ in node.next_functions]
        if kind in _RESHAPED:
            node = below[0]
            continue
        if kind not in ("Div", "Mul") or sum(each is not None for each in below) != 1:
            break
        if below[0] is None and kind == "Div":  # a number that is divided by each
            break
        saved = _saved(node, "other" if below[0] is not None else "self")
        # With dimensions, it may be the weight of a rank's only sample.
        number = None if isinstance(saved, torch.Tensor) and saved.dim() else _number(saved)
        if number is None:
            return place, True
        place = place.divided(number, place.node) if kind == "Div" else place.multiplied(number, place.node)
        node = next(each for each in below if each is not None)
    return place, False


def _is_of_samples(node: Any) -> bool:
    """Whether what is added up there belongs to samples: no penalty on parameters, and no means over the batch."""
    waiting, seen = [each for each, _ in node.next_functions if each is not None], 0
    while waiting and seen < _MOST_NODES:
        place = waiting.pop()
        seen += 1
        name = place.name()
        is_parameter = name == _ACCUMULATE and isinstance(place.variable, torch.nn.Parameter)
        if is_parameter or (name == "MeanBackward1" and _is_over_first(place)):
            continue
        below = [each for each, _ in place.next_functions if each is not None]
        if name in _PRODUCTS:
            # Of two parameters, and not of one with samples.
            if len(below) < 2:
                return True
        elif name not in _ELEMENTWISE or _is_spread(place):
            return True
        waiting += below
    return bool(waiting)


def _is_over_first(node: Any) -> bool:
    """Whether a mean is taken over the first dimension, along which samples lie."""
    below, index = node.next_functions[0]
    # Negative dimensions are kept as unsigned numbers.
    return any(each in (0, 2**64 - len(below._input_metadata[index].shape)) for each in node._saved_dim)


def _is_spread(node: Any) -> bool:
    """Whether it holds more numbers than its parameter: samples were compared with that, as with a cluster's centre."""
    below = node.next_functions
    sizes = [math.prod(each._input_metadata[index].shape) for each, index in below if each is not None]
    return len(sizes) < len(below) and math.prod(node._input_metadata[0].shape) > max(sizes, default=0)


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

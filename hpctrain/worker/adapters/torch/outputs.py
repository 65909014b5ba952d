"""Finds the forward pass that a tensor comes from, where a script calls parts of a network one by one.

The autograd graph of a hidden state leads back to the forward pass, however the state was computed from what that
returned. Without a graph (``detach()``), the shared memory does.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple, cast

import torch

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.storages import Storages


class Origin(NamedTuple):
    """A forward pass that returned a tensor.

    Attributes:
        weight: the weight of its gradient.
        problem: the error to raise if its weight is unknown.
        numel: how many elements the tensor has.
        consumers: where the pass belongs to no batch, the forward passes that got its result.
    """

    weight: float
    problem: HpctrainError | None
    numel: int
    consumers: Consumers | None = None


class Consumers:
    """The forward passes that got the result of one without a batch: their weights, and why one is unknown."""

    def __init__(self) -> None:
        self.weights: set[float] = set()
        self.problem: HpctrainError | None = None


class Outputs:
    """The outputs of forward passes that are still in use."""

    def __init__(self) -> None:
        self._storages: Storages[Origin] = Storages()

    def add(self, tensor: torch.Tensor, weight: float, problem: HpctrainError | None) -> None:
        """Record a tensor that a forward pass returned."""
        origin = Origin(weight, problem, tensor.numel())
        if tensor.grad_fn is not None:
            _metadata(tensor.grad_fn).setdefault(self, set()).add(origin)
        self._storages.add(tensor, origin)

    def add_without_batch(self, tensor: torch.Tensor, consumers: Consumers) -> None:
        """Record a tensor with a graph that a forward pass of no batch returned."""
        if tensor.grad_fn is not None:
            _metadata(tensor.grad_fn).setdefault(self, set()).add(Origin(1.0, None, tensor.numel(), consumers))

    def origins(self, tensor: torch.Tensor) -> Set[Origin]:
        """The recorded forward passes that a tensor was computed from; empty if there is none."""
        return self._storages.of(tensor) if tensor.grad_fn is None else self.behind(tensor.grad_fn)

    def behind(self, start: torch.autograd.graph.Node) -> Set[Origin]:
        """The nearest recorded forward passes in the graph, but for those of no batch."""
        return {each for each in self._nearest(start) if each.consumers is None}

    def without_batch(self, tensor: torch.Tensor) -> set[Consumers]:
        """The nearest recorded forward passes of no batch."""
        return (
            set()
            if tensor.grad_fn is None
            else {each.consumers for each in self._nearest(tensor.grad_fn) if each.consumers is not None}
        )

    def _nearest(self, start: torch.autograd.graph.Node) -> set[Origin]:
        found: set[Origin] = set()
        seen, waiting = {start}, [start]
        while waiting:
            node = waiting.pop()
            if origins := _metadata(node).get(self):
                found |= origins
                continue
            following = {each for each, _ in node.next_functions if each is not None} - seen
            seen |= following
            waiting += following
        return found


def is_whole_output(origin: Origin, tensor: torch.Tensor, count: int) -> bool:
    """Whether a tensor computed from a forward pass's output certainly contains all its ``count`` samples."""
    return tensor.numel() == origin.numel or (tensor.dim() > 0 and tensor.shape[0] % count == 0)


def _metadata(node: torch.autograd.graph.Node) -> dict[object, set[Origin]]:
    known: Any = node.metadata  # annotated as a method, but is an attribute
    return cast(dict[object, set[Origin]], known)

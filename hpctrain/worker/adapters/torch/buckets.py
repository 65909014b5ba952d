"""Gradient buckets: which parameters share one reduction, and where their gradients lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch

from hpctrain.common.bucket_groups import BucketMember, group
from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.engines import TorchEngine, Work

Named = tuple[str, torch.nn.Parameter]


@dataclass(kw_only=True, eq=False)
class BucketSlot:
    """One parameter's place in a bucket."""

    name: str
    parameter: torch.nn.Parameter
    bucket: Bucket
    # While the bucket is reduced, the memory of this parameter's gradient, in the parameter's layout.
    gradient: torch.Tensor
    offset: int = 0
    # The gradient of this backward pass is in place.
    ready: bool = False

    def __post_init__(self) -> None:
        self.address = self.gradient.data_ptr()
        # When the bucket was made.
        self.kind = (self.parameter.dtype, self.parameter.device, self.parameter.shape)


def differs(slot: BucketSlot) -> bool:
    """Whether the parameter is of another type, shape or device than when its slot was made."""
    parameter = slot.parameter
    dtype, device, shape = slot.kind
    return parameter.dtype is not dtype or parameter.device != device or parameter.shape != shape


def refuse_graph(parameter: str) -> NoReturn:
    """Raise HpctrainError for the gradient of a parameter that is part of a graph itself."""
    raise HpctrainError(
        "HT-gradient-in-graph",
        "backward(create_graph=True): the gradient of {parameter} is part of a graph, which does not "
        "pass through the mean over the ranks",
        "take the inner derivative by torch.autograd.grad(…, create_graph=True), add what follows from it to the loss, "
        "and call loss.backward()",
        exit_code=1,
        parameter=parameter,
    )


class Bucket(ABC):
    """Gradients that are reduced together; ``missing`` of them were not made yet by this backward pass."""

    slots: list[BucketSlot]

    def __init__(self, index: int, engine: TorchEngine, name: str) -> None:
        self.index = index
        self.missing = 0
        self._engine = engine
        self._name = name
        self._work: Work | None = None

    @abstractmethod
    def fill(self, slot: BucketSlot) -> None:
        """Put the parameter's gradient where it will be reduced; zeros if it has none."""

    @abstractmethod
    def launch(self) -> None:
        """Start the reduction."""

    @abstractmethod
    def numbers(self) -> list[torch.Tensor]:
        """The gradients of the last backward pass, with zeros for parameters that have none."""

    def finish(self) -> None:
        """Wait for the reduction."""
        assert self._work is not None
        self._work.wait()
        self._work = None

    def reset(self) -> None:
        """Prepare for the next backward pass."""
        self.missing = len(self.slots)
        for slot in self.slots:
            slot.ready = False


class FlatBucket(Bucket):
    """Gradients of one dtype and device, side by side in one buffer of the engine's.

    Autograd makes a fresh tensor where a parameter has no gradient, so after ``zero_grad()`` each is copied into the
    buffer once. After ``zero_grad(set_to_none=False)`` autograd adds to the views of the buffer, and nothing is copied.
    Behind the gradients there are ``flags`` further elements.
    """

    def __init__(
        self,
        index: int,
        parameters: Sequence[Named],
        engine: TorchEngine,
        name: str,
        *,
        flags: int,
        wire: torch.dtype | None,
    ) -> None:
        super().__init__(index, engine, name)
        first = parameters[0][1]
        gradients = sum(parameter.numel() for _, parameter in parameters)
        # Engines reduce real numbers: a complex one counts as two.
        numbers = gradients * (2 if first.is_complex() else 1)
        self._reduced = engine.allocate(numbers + flags, first.dtype.to_real(), first.device)
        self._flat = self._reduced
        if first.is_complex():
            self._flat = torch.view_as_complex(self._reduced[:numbers].view(-1, 2))
        narrower = wire is not None and first.is_floating_point() and wire.itemsize < first.dtype.itemsize
        self._wire = wire if narrower else None
        self.flags = self._reduced[numbers:]
        self.slots = []
        offset = 0
        for key, parameter in parameters:
            view = _view_like(parameter, self._flat, offset)
            self.slots.append(BucketSlot(name=key, parameter=parameter, bucket=self, gradient=view, offset=offset))
            offset += parameter.numel()
        self.reset()

    def fill(self, slot: BucketSlot) -> None:
        gradient = slot.parameter.grad
        if slot.gradient.data_ptr() != slot.address:
            # The model was moved or converted, and PyTorch gave the view other memory.
            slot.gradient = _view_like(slot.parameter, self._flat, slot.offset)
        if gradient is None:
            slot.gradient.zero_()
            return
        if gradient.requires_grad:
            refuse_graph(repr(slot.name))
        if gradient.is_sparse or gradient.data_ptr() != slot.address:
            slot.gradient.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            slot.parameter.grad = slot.gradient

    def launch(self) -> None:
        self._work = self._engine.allreduce(self._reduced, self._name, self._wire)

    def numbers(self) -> list[torch.Tensor]:
        # One operation for all of them. What flags there are behind them are finite.
        return [self._reduced]


class LargeGradient(Bucket):
    """One gradient so large that it is reduced where autograd put it."""

    _nothing: ClassVar[torch.Tensor] = torch.empty(0, device="cpu")

    def __init__(self, index: int, parameter: Named, engine: TorchEngine, name: str) -> None:
        super().__init__(index, engine, name)
        self.slots = [BucketSlot(name=parameter[0], parameter=parameter[1], bucket=self, gradient=self._nothing)]
        self.reset()

    def fill(self, slot: BucketSlot) -> None:
        parameter, gradient = slot.parameter, slot.parameter.grad
        if gradient is None:
            slot.gradient = torch.zeros_like(parameter)
            return
        if gradient.requires_grad:
            refuse_graph(repr(slot.name))
        if gradient.is_sparse or gradient.stride() != parameter.stride():
            # every rank's elements must lie in the same order
            slot.gradient = torch.empty_like(parameter).copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            parameter.grad = slot.gradient
        else:
            slot.gradient = gradient

    def launch(self) -> None:
        gradient = self.slots[0].gradient
        flat = gradient.as_strided((gradient.numel(),), (1,))
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        self._work = self._engine.allreduce(flat, self._name)

    def numbers(self) -> list[torch.Tensor]:
        gradient = self.slots[0].parameter.grad
        return [] if gradient is None else [gradient]

    def reset(self) -> None:
        super().reset()
        self.slots[0].gradient = self._nothing


def make_buckets(
    parameters: Sequence[Named],
    engine: TorchEngine,
    *,
    name: str,
    bucket_bytes: float,
    wire: torch.dtype | None,
) -> tuple[list[Bucket], torch.Tensor]:
    """Buckets in the order in which a backward pass is likely to fill them: the reverse of registration.

    The tensor has the flags that are reduced with the last of them: one element a parameter.
    """
    members = [
        BucketMember(nbytes=each.nbytes, kind=(each.dtype, each.device), dense=_is_dense(each))
        for _, each in parameters
    ]
    groups = group(members, bucket_bytes, in_place=engine.in_place, compressed=wire is not None)
    buckets: list[Bucket] = []
    for index, found in enumerate(groups):
        together = [parameters[number] for number in found.members]
        if found.in_place:
            buckets.append(LargeGradient(index, together[0], engine, f"{name}.{index}"))
        else:
            buckets.append(FlatBucket(index, together, engine, f"{name}.{index}", flags=found.flags, wire=wire))
    tail = buckets[-1] if buckets else None
    return buckets, tail.flags if isinstance(tail, FlatBucket) else torch.empty(0, device="cpu")


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps, in whatever order of the dimensions."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)) == (
        tensor.numel()
    )


def _view_like(parameter: torch.Tensor, flat: torch.Tensor, offset: int) -> torch.Tensor:
    """A window of ``flat`` with the parameter's shape, and its strides where they leave no gaps (channels_last)."""
    if _is_dense(parameter):
        return flat.as_strided(parameter.size(), parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.size())

"""Gradient buckets: which parameters share one reduction, and where their gradients lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from hpctrain.comm.base import TorchEngine, Work

Named = tuple[str, torch.nn.Parameter]

# From this size on, copying a gradient into a bucket costs more than a reduction of its own.
_IN_PLACE_BYTES = 4_000_000


@dataclass(kw_only=True, eq=False)
class Slot:
    """One parameter's place in a bucket.

    Attributes:
        gradient: while the bucket is reduced, the memory of this parameter's gradient, in the parameter's layout.
        ready: whether the gradient of this backward pass is in place.
    """

    name: str
    parameter: torch.nn.Parameter
    bucket: Bucket
    gradient: torch.Tensor
    ready: bool = False


class Bucket(ABC):
    """Gradients that are reduced together.

    Attributes:
        missing: how many of them this backward pass has not made yet.
        finite: whether the last means were, if the engine looked.
    """

    slots: list[Slot]

    def __init__(self, index: int, engine: TorchEngine, name: str) -> None:
        self.index = index
        self.missing = 0
        self.finite: bool | None = None
        self._engine = engine
        self._name = name
        self._work: Work | None = None

    @abstractmethod
    def fill(self, slot: Slot) -> None:
        """Put the parameter's gradient, of zeros if it has none, where it will be reduced."""

    @abstractmethod
    def launch(self) -> None:
        """Start the reduction."""

    def finish(self) -> None:
        """Wait for the reduction."""
        assert self._work is not None
        self._work.wait()
        self.finite = self._work.finite
        self._work = None

    def reset(self) -> None:
        """Be ready for the next backward pass."""
        self.missing = len(self.slots)
        for slot in self.slots:
            slot.ready = False


class FlatBucket(Bucket):
    """Gradients of one dtype and device, side by side in one buffer of the engine's.

    Autograd makes a fresh tensor where a parameter has no gradient, so after ``zero_grad()`` each is copied into the
    buffer once. After ``zero_grad(set_to_none=False)`` autograd adds to the views of the buffer, and nothing is copied.

    Args:
        flags: how many further elements to put behind the gradients.
        wire: the type in which the buffer is reduced, None for its own.
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
        self._flat = engine.allocate(gradients + flags, first.dtype, first.device)
        narrower = wire is not None and first.is_floating_point() and wire.itemsize < first.dtype.itemsize
        self._wire = wire if narrower else None
        self.flags = self._flat[gradients:]
        self.slots = []
        offset = 0
        for key, parameter in parameters:
            view = _view_like(parameter, self._flat, offset)
            self.slots.append(Slot(name=key, parameter=parameter, bucket=self, gradient=view))
            offset += parameter.numel()
        self.reset()

    def fill(self, slot: Slot) -> None:
        gradient = slot.parameter.grad
        if gradient is None:
            slot.gradient.zero_()
        elif gradient.is_sparse or gradient.data_ptr() != slot.gradient.data_ptr():
            slot.gradient.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            slot.parameter.grad = slot.gradient

    def launch(self) -> None:
        self._work = self._engine.allreduce(self._flat, self._name, self._wire)


class LargeGradient(Bucket):
    """One gradient so large that it is reduced where autograd put it."""

    _nothing: ClassVar[torch.Tensor] = torch.empty(0)

    def __init__(self, index: int, parameter: Named, engine: TorchEngine, name: str) -> None:
        super().__init__(index, engine, name)
        self.slots = [Slot(name=parameter[0], parameter=parameter[1], bucket=self, gradient=self._nothing)]
        self.reset()

    def fill(self, slot: Slot) -> None:
        parameter, gradient = slot.parameter, slot.parameter.grad
        if gradient is None:
            slot.gradient = torch.zeros_like(parameter)
        elif gradient.is_sparse or gradient.stride() != parameter.stride():
            # every rank's elements must lie in the same order
            slot.gradient = torch.empty_like(parameter).copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            parameter.grad = slot.gradient
        else:
            slot.gradient = gradient

    def launch(self) -> None:
        gradient = self.slots[0].gradient
        flat = gradient.as_strided((gradient.numel(),), (1,))
        self._work = self._engine.allreduce(flat, self._name)

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

    Returns:
        The buckets, and one element a parameter that travels with the last of them: the reducer's flags.
    """
    large = min(bucket_bytes, _IN_PLACE_BYTES) if engine.in_place and wire is None else float("inf")
    groups = _group(parameters, bucket_bytes, large)
    buckets: list[Bucket] = []
    for index, members in enumerate(groups):
        last = index == len(groups) - 1
        if members[0][1].nbytes >= large and _is_dense(members[0][1]) and not last:
            buckets.append(LargeGradient(index, members[0], engine, f"{name}.{index}"))
        else:
            flags = len(parameters) if last else 0
            buckets.append(FlatBucket(index, members, engine, f"{name}.{index}", flags=flags, wire=wire))
    tail = buckets[-1] if buckets else None
    return buckets, tail.flags if isinstance(tail, FlatBucket) else torch.empty(0)


def _group(parameters: Sequence[Named], bucket_bytes: float, large: float) -> list[list[Named]]:
    """Parameters that go together: of one dtype and device, up to the size of a bucket, large ones by themselves."""
    filling: dict[tuple[torch.dtype, torch.device], list[Named]] = {}
    groups: list[list[Named]] = []
    for key, parameter in reversed(parameters):
        if parameter.nbytes >= large:
            groups.append([(key, parameter)])
            continue
        kind = (parameter.dtype, parameter.device)
        members = filling.setdefault(kind, [])
        members.append((key, parameter))
        if sum(member.nbytes for _, member in members) >= bucket_bytes:
            groups.append(filling.pop(kind))
    return groups + list(filling.values())


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

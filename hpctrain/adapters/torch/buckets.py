"""Flat gradient buckets: which parameters share one reduction, and where each gradient lies in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hpctrain.comm.base import TorchEngine, Work


@dataclass(kw_only=True)
class Slot:
    """The place of one parameter's gradient: ``view`` has the parameter's shape and strides."""

    name: str
    parameter: torch.nn.Parameter
    bucket: Bucket
    view: torch.Tensor
    ready: bool = False

    def fill(self) -> None:
        """Move the parameter's gradient into the bucket and let ``parameter.grad`` be that memory."""
        gradient = self.parameter.grad
        assert gradient is not None
        if gradient.data_ptr() != self.view.data_ptr() or gradient.is_sparse:
            self.view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            self.parameter.grad = self.view
        self.ready = True


class Bucket:
    """Gradients of one dtype and device in one flat buffer, reduced together.

    Behind the gradients lies one flag a parameter: 1 where this rank has a gradient. The mean of the flags travels
    with the gradients, so ranks learn which parameters any of them used without a message of its own.

    Args:
        parameters: names and parameters, in the order in which they lie in the buffer.
        wire: the type in which the buffer is reduced.
    """

    def __init__(
        self,
        index: int,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        engine: TorchEngine,
        name: str,
        wire: torch.dtype | None,
    ) -> None:
        self.index = index
        self._engine = engine
        self._name = name
        first = parameters[0][1]
        gradients = sum(parameter.numel() for _, parameter in parameters)
        size = gradients + len(parameters)
        self._flat = engine.allocate(size, first.dtype, first.device)
        compress = wire is not None and first.is_floating_point() and wire.itemsize < first.dtype.itemsize
        self._wire = engine.allocate(size, wire, first.device) if wire and compress else self._flat
        self._flags = self._flat[gradients:]
        self._work: Work | None = None
        self.slots: list[Slot] = []
        offset = 0
        for key, parameter in parameters:
            view = _view_like(parameter, self._flat, offset)
            self.slots.append(Slot(name=key, parameter=parameter, bucket=self, view=view))
            offset += parameter.numel()
        self.missing = len(self.slots)

    def fill_rest(self) -> list[int]:
        """Fill the slots whose gradient did not come in this backward pass, by zeros where there is none at all.

        Returns:
            The positions of the parameters without a gradient on this rank.
        """
        unused = []
        for position, slot in enumerate(self.slots):
            if slot.ready:
                continue
            if slot.parameter.grad is None:
                slot.view.zero_()
                unused.append(position)
            else:
                slot.fill()
        return unused

    def launch(self, unused: Sequence[int] = ()) -> None:
        """Start the reduction."""
        self._flags.fill_(1)
        if unused:
            self._flags[list(unused)] = 0
        if self._wire is not self._flat:
            self._wire.copy_(self._flat)
        self._work = self._engine.allreduce(self._wire, self._name)

    def finish(self, unused: Sequence[int] = ()) -> None:
        """Wait for the reduction, and give a gradient to the parameters that only other ranks used."""
        assert self._work is not None
        self._work.wait()
        self._work = None
        if self._wire is not self._flat:
            self._flat.copy_(self._wire)
        for position in unused:
            if self._flags[position] > 0:
                self.slots[position].parameter.grad = self.slots[position].view

    def reset(self) -> None:
        """Be ready for the next backward pass."""
        self.missing = len(self.slots)
        for slot in self.slots:
            slot.ready = False


def make_buckets(
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
    engine: TorchEngine,
    *,
    name: str,
    bucket_bytes: float,
    wire: torch.dtype | None,
) -> list[Bucket]:
    """Buckets in the order in which a backward pass is likely to fill them: the reverse of registration."""
    filling: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.nn.Parameter]]] = {}
    full: list[list[tuple[str, torch.nn.Parameter]]] = []
    for key, parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        members = filling.setdefault(kind, [])
        members.append((key, parameter))
        if sum(member.nbytes for _, member in members) >= bucket_bytes:
            full.append(filling.pop(kind))
    full.extend(filling.values())
    return [Bucket(index, members, engine, f"{name}.{index}", wire) for index, members in enumerate(full)]


def _view_like(parameter: torch.Tensor, flat: torch.Tensor, offset: int) -> torch.Tensor:
    """A window of ``flat`` with the parameter's shape, and its strides where they leave no gaps (channels_last)."""
    sizes, strides = parameter.size(), parameter.stride()
    reach = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if reach == parameter.numel():
        return flat.as_strided(sizes, strides, offset)
    return flat[offset : offset + parameter.numel()].view(sizes)

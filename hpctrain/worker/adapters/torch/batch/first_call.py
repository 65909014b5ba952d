"""What a model's first call on a rank's rows leaves in it: tensors with a graph, and state that the samples move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpctrain.worker.adapters.torch.batch.ranks import DataRanks
from hpctrain.worker.adapters.torch.guarding import checksums

# The most names in a message.
_NAMED = 5


class Left(NamedTuple):
    """What a call has left on a rank.

    Attributes:
        keeping: the parts of the model that keep a tensor with a graph, such as an auxiliary loss.
        moved: buffers and kept tensors that have other values than before, each with a checksum.
    """

    keeping: tuple[str, ...] = ()
    moved: tuple[tuple[str, int], ...] = ()


class FirstCall:
    """The state of a module before its first call in a training."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = [(each, each.clone()) for each in module.buffers()] if module.training else []
        self._kept = {id(tensor) for _, tensor in self._tensors() if tensor.grad_fn is not None}
        self._before = dict(self._states())

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are plain attributes, with the names of the modules."""
        for name, part in self._module.named_modules():
            for value in list(vars(part).values()):
                if isinstance(value, torch.Tensor):
                    yield name, value

    def _states(self) -> Iterator[tuple[str, int]]:
        """Checksums of what samples may move. Scripts are told of the statistics of batch norms later."""
        for name, part in self._module.named_modules():
            values = {} if isinstance(part, _BatchNorm) else {**part._buffers, **vars(part)}
            for key, value in values.items():
                if type(value) is torch.Tensor and value.grad_fn is None and value.layout is torch.strided:
                    yield f"{name}.{key}".lstrip("."), int(checksums([value])[0])

    def left(self) -> Left:
        """What the call has left."""
        graphs = ((name, tensor) for name, tensor in self._tensors() if tensor.grad_fn is not None)
        graphs = ((name, tensor) for name, tensor in self._tensors() if tensor.grad_fn is not None)
        keeping = {name for name, tensor in graphs if id(tensor) not in self._kept}
        moved = ((name, value) for name, value in self._states() if self._before.get(name, value) != value)
        return Left(tuple(sorted(keeping)), tuple(moved))

    def undo(self) -> None:
        """Restore the buffers."""
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)


def name_moved(ranks: DataRanks, model: str, found: Sequence[Left]) -> None:
    """Say which state of a model the samples have moved differently on the ranks."""
    everyone = [dict(left.moved) for left in found]
    names = [name for name, value in everyone[0].items() if any(each.get(name) != value for each in everyone)]
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        ranks.say(
            f"warning: {', '.join(names[:_NAMED])}{more} of {model} follow each rank's own samples, and differ between "
            "the ranks; average them by hand, or compute them outside of the model, where a batch is whole"
        )

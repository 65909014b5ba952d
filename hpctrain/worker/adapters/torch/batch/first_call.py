"""What a model's first call on a rank's rows leaves in it: tensors with a graph, and state that the samples move."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from hpctrain.worker.adapters.torch.batch.ranks import DataRanks
from hpctrain.worker.adapters.torch.guarding import checksums

# The most names in a message.
_NAMED = 5
# What torch.nn.Module keeps of its own.
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))


class Left(NamedTuple):
    """What a call has left on a rank.

    Attributes:
        keeping: the parts of the model that keep a tensor with a graph, such as an auxiliary loss.
        kept: the parts that keep another tensor than before, with the checksums of such.
        moved: buffers and kept tensors that have other values than before, each with a checksum.
    """

    keeping: tuple[str, ...] = ()
    kept: tuple[tuple[str, int], ...] = ()
    moved: tuple[tuple[str, int], ...] = ()


class ModuleState:
    """What calls of a module change: its parts' attributes, what lists and dictionaries among these hold, buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = [(vars(part), dict(vars(part))) for part in module.modules()]
        # Not parameters: FSDP2 has put whole ones there for the call, and knows of it.
        items = (item for _, before in self._attributes for item in before.items())
        values = [value for name, value in items if name == "_buffers" or name not in _OWN_ATTRIBUTES]
        self._members = [(value, copy.copy(value)) for value in values if isinstance(value, list | dict | set)]
        self._buffers = [(each, each.detach().clone()) for each in module.buffers()]

    def restore(self) -> None:
        """Undo the changes."""
        for now, before in (*self._attributes, *self._members):
            now.clear()
            now.extend(before) if isinstance(now, list) else now.update(before)
        with torch.no_grad():
            for buffer, values in self._buffers:
                buffer.copy_(values)


class FirstCall:
    """The state of a module before its first call in a training."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._state = ModuleState(module)
        self._kept = [tensor for _, tensor in self._tensors()]  # alive, so that no other tensor gets the id of one
        self._before = dict(self._states())

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are plain attributes, or in containers that are, with the names of the modules."""
        for name, part in self._module.named_modules():
            for key, value in list(vars(part).items()):
                if key not in _OWN_ATTRIBUTES:
                    yield from ((name, each) for each in tree_leaves(value) if isinstance(each, torch.Tensor))

    def _states(self) -> Iterator[tuple[str, int]]:
        """Checksums of what samples may move. Scripts are told of the statistics of batch norms later."""
        for name, part in self._module.named_modules():
            values = {} if isinstance(part, _BatchNorm) else {**part._buffers, **vars(part)}
            for key, value in values.items():
                if type(value) is torch.Tensor and value.grad_fn is None and value.layout is torch.strided:
                    yield f"{name}.{key}".lstrip("."), int(checksums([value])[0])

    def left(self) -> Left:
        """What the call has left."""
        known = set(map(id, self._kept))
        new = [(name, tensor) for name, tensor in self._tensors() if id(tensor) not in known]
        keeping = {name for name, tensor in new if tensor.grad_fn is not None}
        plain = [each for each in new if type(each[1]) is torch.Tensor and each[1].layout is torch.strided]
        kept = tuple((name, int(checksums([tensor.detach()])[0])) for name, tensor in plain)
        moved = ((name, value) for name, value in self._states() if self._before.get(name, value) != value)
        return Left(tuple(sorted(keeping)), kept, tuple(moved))

    def undo(self) -> None:
        """Restore the state."""
        self._state.restore()


def keeping_parts(found: Sequence[Left]) -> list[str]:
    """The parts that keep a tensor which depends on a rank's samples: with a graph, or different on the ranks."""
    keeping = {name for left in found for name in left.keeping}
    everyone = [Counter(left.kept) for left in found]
    return sorted(keeping.union(name for each in everyone for name, _ in each - everyone[0] + (everyone[0] - each)))


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

"""Broadcasts rank 0's weights, buffers and optimizer state to the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hpctrain.worker.adapters.same_data import compare_models
from hpctrain.worker.adapters.torch.optimizer_contents import optimizers_in, parameters_of
from hpctrain.worker.comm.base import Communicator
from hpctrain.worker.comm.engines import TorchEngine

_CHUNK_BYTES = 64_000_000
# The entries of an optimizer's group that each rank keeps.
_NAMES = frozenset({"params", "param_names"})
_numbers = itertools.count()


def start_from_rank_0(comm: Communicator, model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Overwrite a model's parameters and buffers, and its optimizers' state, with those of rank 0. Collective."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    check_same(comm, tensors)
    broadcast_tensors(comm, [tensor for _, tensor in tensors])
    for optimizer in optimizers:
        _broadcast_optimizer(comm, optimizer)


def check_same(comm: Communicator, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse tensors with other names or of another form than rank 0's: ranks would wait for each other. Collective."""
    forms = [f"{name} {tuple(t.shape)} {t.dtype} requires_grad={t.requires_grad}" for name, t in tensors]
    compare_models(comm, "tensor", forms)


def _broadcast_optimizer(comm: Communicator, optimizer: torch.optim.Optimizer) -> None:
    """Overwrite the optimizer's settings and state with rank 0's, which alone may have loaded a checkpoint.

    They are written into the existing groups and state, and into those of optimizers within it. ``load_state_dict``
    would replace these objects, and whatever else refers to them, such as a scheduler, would keep the old ones.
    """
    own = [_Settings(each) for each in optimizers_in(optimizer)]
    values = pytree.tree_map_only(torch.Tensor, _dense, [each.values() for each in own])
    # The nested dictionary is sent first, with a shape in place of each tensor. The values follow.
    shapes = pytree.tree_map_only(torch.Tensor, lambda t: _Shape(tuple(t.shape), t.dtype, t.device.type), values)
    shapes = comm.broadcast_object(shapes)
    if comm.rank != 0:
        values = pytree.tree_map_only(
            _Shape, lambda each: torch.empty(each.shape, dtype=each.dtype, device=each.device), shapes
        )
    broadcast_tensors(comm, [each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor)])
    for settings, value in zip(own, values, strict=True):
        settings.write(value)


class _Settings:
    """The contents of an optimizer's groups and state, with numbers in place of parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        attributes = vars(optimizer)  # an optimizer around another one may show that one's
        self._groups: list[dict[str, Any]] = attributes.get("param_groups", [])
        self._state: dict[Any, Any] = attributes.get("state", {})
        self._parameters = list(parameters_of(optimizer))
        self._numbers = {id(each): number for number, each in enumerate(self._parameters)}

    def values(self) -> dict[str, Any]:
        return {
            "groups": [{key: group[key] for key in group if key not in _NAMES} for group in self._groups],
            "state": {self._key(key): value for key, value in self._state.items() if self._is_known(key)},
        }

    def _is_known(self, key: Any) -> bool:
        return not isinstance(key, torch.Tensor) or id(key) in self._numbers

    def _key(self, key: Any) -> Any:
        """A parameter's number, in a tuple, because other keys may be numbers themselves."""
        return (self._numbers[id(key)],) if id(key) in self._numbers else key

    def write(self, values: dict[str, Any]) -> None:
        for group, sent in zip(self._groups, values["groups"], strict=True):
            _replace(group, sent, [key for key in group if key not in _NAMES])
        sent = {self._parameters[key[0]] if isinstance(key, tuple) else key: v for key, v in values["state"].items()}
        _replace(self._state, sent, filter(self._is_known, list(self._state)))


def _replace(own: dict[Any, Any], sent: dict[Any, Any], known: Iterable[Any]) -> None:
    """Give a dictionary what was sent in the place of the keys that were known."""
    for key in set(known) - sent.keys():
        del own[key]
    own.update({key: _written(own.get(key), value) for key, value in sent.items()})


def _written(own: Any, value: Any) -> Any:
    """What was sent, in the memory of this rank's own tensors where these have its form."""
    if isinstance(value, dict) and isinstance(own, dict):
        _replace(own, value, list(own))
        return own
    if isinstance(value, list) and isinstance(own, list) and len(own) == len(value):
        return list(map(_written, own, value))  # such as further lists of parameters
    if not isinstance(own, torch.Tensor) or not isinstance(value, torch.Tensor) or own is value:
        return value
    if (own.shape, own.dtype, own.layout) != (value.shape, value.dtype, value.layout):
        return value
    own.detach().copy_(value)
    return own


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A dense copy: SGD's momentum may be sparse, and ranks that add to it in different layouts round differently."""
    return tensor.to_dense() if tensor.is_sparse else tensor


@dataclass(frozen=True)
class _Shape:
    """Stands for a tensor whose values are sent separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def broadcast_tensors(comm: Communicator, tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite many tensors with those of rank 0, in few messages: their bytes joined, whatever their types."""
    engine = comm.torch()
    chunk: list[torch.Tensor] = []
    size = 0
    for tensor in (each.detach() for each in tensors):
        if chunk and (size + tensor.nbytes > _CHUNK_BYTES or tensor.device != chunk[0].device):
            _broadcast_chunk(engine, chunk)
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor.nbytes
    if chunk:
        _broadcast_chunk(engine, chunk)


def _broadcast_chunk(engine: TorchEngine, tensors: list[torch.Tensor]) -> None:
    joined = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
    engine.broadcast(joined, f"broadcast.{next(_numbers)}")
    for tensor, part in zip(tensors, joined.split([tensor.nbytes for tensor in tensors]), strict=True):
        # a part starts at any byte, but a view as a wider type must be aligned: clone
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))

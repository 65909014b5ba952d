"""Broadcasts one rank's weights, buffers and optimizer state to the others: rank 0's at the start."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch.utils import _pytree as pytree

from hpctrain.comm.base import Communicator, TorchEngine
from hpctrain.errors import HpctrainError

_CHUNK_BYTES = 64_000_000
_numbers = itertools.count()


def check_same_model(comm: Communicator, model: torch.nn.Module) -> None:
    """Refuse ranks that built different models, which would otherwise wait for each other's tensors.

    Raises:
        HpctrainError: names the first tensor that differs from rank 0's, and the rank.
    """
    own = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in _named_tensors(model)]
    everyone = comm.allgather_object(own)
    for rank, theirs in enumerate(everyone):
        for first, other in itertools.zip_longest(everyone[0], theirs):
            if first != other:
                raise HpctrainError(
                    f"rank {rank} built a different model from rank 0: {other} where rank 0 has {first} (name, shape, "
                    "dtype, requires_grad)",
                    "build the same model on every rank",
                )


def broadcast_model(comm: Communicator, model: torch.nn.Module, root: int = 0) -> None:
    """Overwrite parameters and buffers with those of rank ``root``."""
    _broadcast(comm, [tensor.detach() for _, tensor in _named_tensors(model)], root)


def broadcast_optimizer(comm: Communicator, optimizer: torch.optim.Optimizer, root: int = 0) -> None:
    """Overwrite the optimizer's settings and state with one rank's: only rank 0 may have loaded a checkpoint."""
    before = optimizer.state_dict()
    own = pytree.tree_map_only(torch.Tensor, _dense, before)
    # The nested dictionary goes ahead with a shape in place of each tensor, their values follow.
    shapes = pytree.tree_map_only(torch.Tensor, _Shape.of, own)
    state = comm.broadcast_object(shapes) if root == 0 else comm.allgather_object(shapes)[root]
    state = own if comm.rank == root else pytree.tree_map_only(_Shape, _Shape.empty, state)
    _broadcast(comm, [leaf.detach() for leaf in pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)], root)
    if comm.rank != root or any(map(_is_sparse, pytree.tree_leaves(before))):
        optimizer.load_state_dict(state)


def _is_sparse(leaf: object) -> bool:
    """SGD's momentum of sparse gradients is sparse; ranks that add to it in different layouts round differently."""
    return isinstance(leaf, torch.Tensor) and leaf.is_sparse


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


class _Shape:
    """Stands for a tensor whose values are sent separately."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = tuple(shape), dtype, device.type

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Shape:
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _broadcast(comm: Communicator, tensors: Iterable[torch.Tensor], root: int) -> None:
    """Many tensors in few messages: their bytes joined, whatever their types."""
    engine = comm.torch()
    chunk: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if chunk and (size + tensor.nbytes > _CHUNK_BYTES or tensor.device != chunk[0].device):
            _broadcast_chunk(engine, chunk, root)
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor.nbytes
    if chunk:
        _broadcast_chunk(engine, chunk, root)


def _broadcast_chunk(engine: TorchEngine, tensors: list[torch.Tensor], root: int) -> None:
    joined = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
    engine.broadcast(joined, f"broadcast.{next(_numbers)}", root)
    for tensor, part in zip(tensors, joined.split([tensor.nbytes for tensor in tensors]), strict=True):
        # a part starts at any byte, but a view as a wider type must be aligned: clone
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))

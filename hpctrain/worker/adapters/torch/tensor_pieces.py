"""This rank's pieces of tensors, whole or divided over ranks, for checkpoints and for the guard."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from numpy.typing import NDArray

from hpctrain.common.checkpoints.pieces import Box, Piece
from hpctrain.common.checkpoints.read import piece_of, shape_of
from hpctrain.common.errors import HpctrainError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# An optimizer asks for each parameter: these types need no search for the other.
_WHOLE = (torch.Tensor, torch.nn.Parameter)


def pieces_of(tensor: torch.Tensor) -> list[Piece]:
    """This rank's pieces of a tensor, for a checkpoint: none, one, or with some placements several.

    A plain tensor is one piece with all of it.
    """
    local = local_tensor(tensor).detach()
    return [
        Piece(
            shape=tuple(tensor.shape),
            box=box,
            nbytes=box.size * tensor.element_size(),
            array=lambda part=local[slices]: array_of(part),  # type: ignore[misc]
        )
        for slices, box in local_pieces(tensor)
    ]


@torch.no_grad()
def fill(tensor: torch.Tensor, state: Mapping[str, NDArray[Any]], name: str) -> None:
    """Overwrite this rank's pieces of a tensor, plain or a DTensor of any layout, by the state's array ``name``.

    Raises KeyError or ValueError where the state has no such array, or one of another shape.
    """
    if (shape := shape_of(state, name)) != tuple(tensor.shape):
        raise ValueError(f"{name!r} has shape {list(shape)} there, and {list(tensor.shape)} here")
    local = local_tensor(tensor)
    for slices, box in local_pieces(tensor):
        local[slices].copy_(tensor_of(piece_of(state, name, box)))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor; a plain one is its own."""
    # What to_local() returns without a graph, 50 times as fast: a step asks for each parameter several times.
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def laid_out(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor with its numbers in another's order in memory, which fused kernels need; a copy where it had not."""
    own, other = tensor.stride(), like.stride()
    # The stride of a dimension of size 1 says nothing, and kernels do not look at it.
    if own == other or all(size == 1 or a == b for size, a, b in zip(like.shape, own, other, strict=True)):
        return tensor
    return torch.empty_like(like).copy_(tensor)


def local_pieces(tensor: torch.Tensor) -> list[tuple[tuple[slice, ...], Box]]:
    """The slices of this rank's part of a tensor, each with the box of the whole tensor that it holds."""
    if is_dtensor(tensor):
        return _dtensor_pieces(tensor)
    return [(tuple(slice(0, size) for size in tensor.shape), Box.whole(tensor.shape))]


def _dtensor_pieces(tensor: DTensor) -> list[tuple[tuple[slice, ...], Box]]:
    from torch.distributed.tensor import Partial

    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise HpctrainError(
            "HT-tensor-wrong-placements",
            "a tensor of shape {shape} is a sum over ranks that was not added up",
            shape=list(tensor.shape),
        )
    if tensor.device_mesh.get_coordinate() is None:
        return []
    runs = [_runs(_indices(tensor, dimension)) for dimension in range(tensor.ndim)]
    held, local = [sum(length for _, _, length in each) for each in runs], list(tensor.to_local().shape)
    if held != local:
        raise HpctrainError(
            "HT-tensor-wrong-placements",
            "this rank holds {local} of a tensor of shape {shape}, but its placements {placements} give {held}",
            "let tensor parallelism divide dimensions without a remainder",
            local=local,
            shape=list(tensor.shape),
            placements=tensor.placements,
            held=held,
        )
    return [
        (
            tuple(slice(begin, begin + length) for begin, _, length in each),
            Box(tuple(offset for _, offset, _ in each), tuple(length for _, _, length in each)),
        )
        for each in itertools.product(*runs)
    ]


def _indices(tensor: DTensor, dimension: int) -> torch.Tensor:
    """Which indices of a dimension this rank has, in the order of its part.

    After ``fully_shard`` over tensor parallelism along one dimension, the tensor is divided from right to left: first
    along the last axis of the mesh. PyTorch writes that as ``_StridedShard``, whose own reading, from left to right,
    means other elements where the dimension does not divide; see ``FSDPParam._init_sharding_spec_tp`` in
    torch/distributed/fsdp/_fully_shard/_fsdp_param.py.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    mesh, placements = tensor.device_mesh, tensor.placements
    if any(isinstance(placement, _StridedShard) for placement in placements):
        order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(placements, mesh)
    else:
        order = tensor._spec.shard_order
    if order is None:
        # Without an order of the mesh's axes, each divides the rest of the ones before it, as its placement says.
        dims = [each.dim if isinstance(each, Shard | _StridedShard) else None for each in placements]
        axes = [axis for axis, dim in enumerate(dims) if dim == dimension]
    else:
        axes = [axis for entry in order if entry.tensor_dim == dimension for axis in entry.mesh_dims]
    indices = torch.arange(tensor.shape[dimension], device="cpu")
    for axis in axes:
        placement = placements[axis]
        factor = placement.split_factor if order is None and isinstance(placement, _StridedShard) else 1
        parts, _ = _StridedShard(0, split_factor=factor)._split_tensor(indices, mesh.size(axis), with_padding=False)
        indices = parts[mesh.get_local_rank(axis)]
    return indices


def _runs(indices: torch.Tensor) -> list[tuple[int, int, int]]:
    """Consecutive indices: where they begin in the list, the first of them, and how many there are."""
    ends = [*(torch.nonzero(indices.diff() != 1).flatten() + 1).tolist(), len(indices)]
    begins = [0, *ends[:-1]]
    return [(begin, int(indices[begin]), end - begin) for begin, end in zip(begins, ends, strict=True) if end > begin]


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor. It does not import them, which takes a second: unless imported, there is none."""
    if type(tensor) in _WHOLE:
        return False
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor as an array, which shares its memory on a CPU."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        halves: NDArray[Any] = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return halves
    array: NDArray[Any] = tensor.numpy()
    return array


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """An array as a tensor, which shares its memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)

"""Which elements of a whole tensor a rank has in a DTensor.

After ``fully_shard`` over tensor parallelism along one dimension, the tensor is divided from right to left: first along
the last axis of the mesh. PyTorch writes that as ``_StridedShard``, whose own reading, from left to right, means other
elements where the dimension does not divide; see ``FSDPParam._init_sharding_spec_tp`` in
torch/distributed/fsdp/_fully_shard/_fsdp_param.py.
"""

from __future__ import annotations

import itertools
from typing import TypeGuard

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Partial, Placement, Shard, _StridedShard

from hpctrain.common.checkpoints.pieces import Box
from hpctrain.common.errors import HpctrainError

Slices = tuple[slice, ...]


def dtensor_pieces(tensor: DTensor) -> list[tuple[Slices, Box]]:
    """The slices of this rank's part of a tensor, each with the box of the whole tensor that it holds."""
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
    """Which indices of a dimension this rank has, in the order of its part."""
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(isinstance(placement, _StridedShard) for placement in placements):
        order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(placements, mesh)
    else:
        order = tensor._spec.shard_order
    if order is None:
        # Without an order of the mesh's axes, each divides the rest of the ones before it, as its placement says.
        axes = [axis for axis, each in enumerate(placements) if _divides(each) and each.dim == dimension]
    else:
        axes = [axis for entry in order if entry.tensor_dim == dimension for axis in entry.mesh_dims]
    indices = torch.arange(tensor.shape[dimension], device="cpu")
    for axis in axes:
        placement = placements[axis]
        factor = placement.split_factor if order is None and isinstance(placement, _StridedShard) else 1
        parts, _ = _StridedShard(0, split_factor=factor)._split_tensor(indices, mesh.size(axis), with_padding=False)
        indices = parts[mesh.get_local_rank(axis)]
    return indices


def _divides(placement: Placement) -> TypeGuard[Shard | _StridedShard]:
    return isinstance(placement, Shard | _StridedShard)


def _runs(indices: torch.Tensor) -> list[tuple[int, int, int]]:
    """Consecutive indices: where they begin in the list, the first of them, and how many there are."""
    ends = [*(torch.nonzero(indices.diff() != 1).flatten() + 1).tolist(), len(indices)]
    begins = [0, *ends[:-1]]
    return [(begin, int(indices[begin]), end - begin) for begin, end in zip(begins, ends, strict=True) if end > begin]

"""This rank's pieces of tensors, whole or divided over ranks, for checkpoints and for the guard."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from numpy.typing import NDArray

from hpctrain.common.checkpoints.pieces import Box, Piece
from hpctrain.common.checkpoints.read import piece_of, shape_of

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

    Raises:
        KeyError, ValueError: the state has no such array, or one of another shape.
        HpctrainError: the files cannot be read, or :func:`pieces_of` refuses the tensor.
    """
    if (shape := shape_of(state, name)) != tuple(tensor.shape):
        raise ValueError(f"{name!r} has shape {list(shape)} there, and {list(tensor.shape)} here")
    local = local_tensor(tensor)
    for slices, box in local_pieces(tensor):
        local[slices].copy_(tensor_of(piece_of(state, name, box)))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor; a plain one is its own."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


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
        from hpctrain.worker.adapters.torch.dtensor_layout import dtensor_pieces

        return dtensor_pieces(tensor)
    return [(tuple(slice(0, size) for size in tensor.shape), Box.whole(tensor.shape))]


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

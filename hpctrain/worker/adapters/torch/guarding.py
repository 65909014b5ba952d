"""The guard over PyTorch parameters, whole and divided ones, and checks that gradients are finite."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
import xxhash
from torch.utils._python_dispatch import _disable_current_modes

from hpctrain.worker.adapters.guard import Checksums, Guard
from hpctrain.worker.adapters.torch.tensor_pieces import local_pieces, local_tensor
from hpctrain.worker.comm import Communicator


def guard_over(
    comm: Communicator, parameters: Iterable[tuple[str, torch.Tensor]], *, every: int, divided: bool = False
) -> Guard:
    """A guard over all parameters: one that is unfrozen later, and then not reduced, is caught by it.

    Parameters are the same on all ranks, unless the model is ``divided`` over them, as DTensors or as stages of a
    pipeline: pieces that several ranks hold are compared among these then, and this is collective.
    """
    held = [(name, each, slices, box) for name, each in parameters for slices, box in local_pieces(each)]
    parts = [(tensor, slices) for _, tensor, slices, _ in held]

    def part(tensor: torch.Tensor, slices: tuple[slice, ...]) -> torch.Tensor:
        # Looked up in each call because a tensor may get other memory.
        return local_tensor(tensor).detach()[slices]

    def not_finite() -> str:
        # A frozen one may be a mask of infinities.
        own = [(name, part(tensor, slices)) for name, tensor, slices, _ in held if tensor.requires_grad]
        finite = _read([torch.isfinite(values).all() for _, values in own])
        return next((name for (name, _), each in zip(own, finite, strict=True) if not each), "")

    return Guard(
        comm,
        [name for name, _, _, _ in held],
        lambda: checksums(part(*each) for each in parts),
        every=every,
        version=lambda: _version(local_tensor(tensor) for tensor, _ in parts),
        not_finite=not_finite,
        boxes=[box for _, _, _, box in held] if divided else None,
    )


def release(guard: Guard) -> None:
    """Release the parameters of a model that is collected as garbage.

    That may come while PyTorch traces or measures another model, under a mode that takes no tensors but its own.
    """
    with _disable_current_modes():
        guard.release()


# Left out: ranks choose kernels for the parameters of their own stages, and all of them compute the same.
_KERNELS = ("foreach", "fused")


def settings_of(optimizers: Iterable[torch.optim.Optimizer]) -> Callable[[], dict[str, object]]:
    """A function that returns the numbers in the optimizers' groups while they live: learning rates, momenta, ..."""
    references = [weakref.ref(each) for each in optimizers]

    def settings() -> dict[str, object]:
        living = [each for reference in references if (each := reference()) is not None]
        return {
            f"{key} of {type(each).__name__} {place} (group {number})": setting
            for place, each in enumerate(living)
            for number, group in enumerate(each.param_groups)
            for key, value in group.items()
            if key not in _KERNELS and (setting := _setting(value)) is not None
        }

    return settings


def _setting(value: object) -> object:
    """A number, or several in a tuple. Integers are left out, since one may be the rank or a count of its own."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, tuple) and value:
        return value if all(isinstance(each, int | float) for each in value) else None
    return value if isinstance(value, float | bool) else None


def checksums(tensors: Iterable[torch.Tensor]) -> Checksums:
    """One integer per tensor: its hash (XXH3), on a GPU the sum of its bits. One flipped bit changes either."""
    return np.array(_read([_checksum(tensor.detach().contiguous().view(-1)) for tensor in tensors]), dtype=np.int64)


def _read(numbers: Sequence[torch.Tensor]) -> list[int]:
    """Single numbers, read together: on a GPU each reading waits until it has done what it was given."""
    return torch.stack([each.to(numbers[0].device) for each in numbers]).tolist() if numbers else []


def _checksum(flat: torch.Tensor) -> torch.Tensor:
    if flat.device.type == "cpu":
        # The hash is as fast as the memory, and four times as fast as a sum of 32-bit words. A sum of 64-bit words is
        # no alternative: two flipped top bits cancel in it.
        digest = xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy().data) - (1 << 63)
        return torch.tensor(digest, device="cpu")
    words = flat.view(torch.int32) if flat.element_size() % 4 == 0 else flat.view(torch.uint8)
    return words.sum(dtype=torch.int64)


def values_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, of sparse ones the elements that are there."""
    return [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]


def are_finite(values: Iterable[torch.Tensor], norm: float) -> bool:
    """Whether every element is finite, with the norm over all of them known. Waits only where that is not finite."""
    # A finite norm proves all numbers finite. Squares of large finite numbers may overflow: check each element then.
    return math.isfinite(norm) or all(bool(part.isfinite().all()) for part in values)


def _version(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """A value that each write to the tensors changes, except by ``tensor.data``, another library or fused kernels.

    PyTorch 2.13's fused SGD and AdamW leave it as it is.
    """
    return [(tensor._version, tensor.data_ptr()) for tensor in tensors]

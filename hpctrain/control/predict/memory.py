"""The bytes of a rank at the moment when they are most, whatever it trains, and how many samples fit.

The state of a training, and what ZeRO divides of it, is in closed form: Rajbhandari et al. 2020, arXiv 1910.02054,
section 5 and table 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from hpctrain.control.predict.values import Estimate

# Memory that CUDA's caching allocator loses to rounding and holes, as a share of that of the tensors: on an
# H100 5 to 20 %, by benchmarks/one_gpu.py. It rounds to 512 bytes, and takes 2 or 20 MiB at once
# (https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management).
FRAGMENTATION = 0.1
# The memory of a process's CUDA context (0.81 GB there) and of cuBLAS' and cuDNN's workspaces (0.06 to 0.2 GB). NCCL's
# buffers are not in it.
CONTEXT_BYTES = 930_000_000
# What libraries, other streams and changing shapes may need beside what is predicted of a transformer.
USABLE = 0.95
_LARGEST_BATCH = 1 << 24

Stage = Literal[0, 1, 2, 3]

# The first stage at which ranks divide each kind of state.
_DIVIDED_FROM = {"optimizer": 1, "gradients": 2, "parameters": 3}


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of a rank at its peak.

    Attributes:
        moment: when that is.
        tensors: bytes by what holds them.
        communication: NCCL's buffers.
    """

    moment: str
    tensors: Mapping[str, float]
    communication: float = 0.0

    @property
    def allocated(self) -> float:
        """The bytes of all tensors, as ``torch.cuda.max_memory_allocated`` counts them."""
        return sum(self.tensors.values())

    @property
    def fragmentation(self) -> float:
        """What PyTorch's allocator cannot use."""
        return FRAGMENTATION * self.allocated

    @property
    def reserved(self) -> float:
        """What PyTorch's allocator takes from the device."""
        return self.allocated + self.fragmentation

    @property
    def used(self) -> float:
        """The device's memory in use, as nvidia-smi shows it."""
        return self.reserved + self.communication + CONTEXT_BYTES

    def estimate(self, *, on_gpu: bool = True) -> Estimate:
        """Bytes on the device: on a GPU without fragmentation, with what is usual of it, and with twice that."""
        # Imported here because a launcher that counts memory needs no NumPy.
        from hpctrain.control.predict.values import Estimate

        if not on_gpu:
            return Estimate(value=self.allocated, low=self.allocated, high=self.allocated)
        return Estimate(value=self.used, low=self.used - self.fragmentation, high=self.used + self.fragmentation)

    def fits(self, nbytes: float) -> bool:
        """Whether a device with so many bytes has room for what is predicted of a transformer."""
        return self.used <= USABLE * nbytes


def largest(moments: list[RankMemory]) -> RankMemory:
    """The moment at which tensors take most."""
    return max(moments, key=lambda memory: memory.allocated)


def fewer(taken: float, choices: Mapping[str, float]) -> dict[str, int]:
    """The choices that take less memory, by more than their count is exact."""
    return {name: round(nbytes) for name, nbytes in choices.items() if nbytes < 0.999 * taken}


def most_samples(fits: Callable[[int], bool]) -> int:
    """The most samples at once that fit, where fewer fit too; 0 if not even one does."""
    low, high = 0, 1
    while high < _LARGEST_BATCH and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of the state, of a rank or of one parameter."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """The bytes of all three."""
        return self.parameters + self.gradients + self.optimizer


def zero_bytes(parameters: float, each: StateBytes, *, stage: Stage, ranks: int) -> StateBytes:
    """The bytes of a rank.

    Args:
        parameters: that the rank has part in: those of its stage of a pipeline, divided by the ranks along tp.
        each: the bytes of one parameter's state.
        stage: 0 divides nothing, 1 the optimizer's state, 2 the gradients too, 3 the parameters too.
        ranks: the number of ranks that they are divided over.
    """
    share = {kind: parameters / (ranks if stage >= first else 1) for kind, first in _DIVIDED_FROM.items()}
    return StateBytes(**{kind: count * getattr(each, kind) for kind, count in share.items()})

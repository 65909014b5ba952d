"""The bytes of a rank at the moment when they are most, and how many samples fit.

The state of a training, and what ZeRO divides of it, is in closed form: Rajbhandari et al. 2020, arXiv 1910.02054,
section 5 and table 1. Networks that were recorded are gone through layer by layer: activations are kept and freed,
gradients appear, and the largest sum counts. The unit tests hold that against
``torch.distributed._tools.mem_tracker.MemTracker``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from hpctrain.common.bucket_groups import BUCKET_BYTES
from hpctrain.common.errors import HpctrainError
from hpctrain.common.optim.rules import TOGETHER
from hpctrain.common.recipes.optimizers import Optimizer
from hpctrain.common.workloads.workload import GradientBucket, Layer, Workload, buckets

if TYPE_CHECKING:
    from hpctrain.control.predict.compute import Precision
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
_ITEM_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "int16": 2, "int64": 8, "float64": 8}
# Bytes of an element of the weights, and of their gradients: autocast leaves them as they are.
_WEIGHT_BYTES = 4

Stage = Literal[0, 1, 2, 3]


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of a rank at its peak, bytes by what holds them, and NCCL's buffers beside."""

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
    def used(self) -> float:
        """The device's memory in use, as nvidia-smi shows it."""
        return self.allocated + self.fragmentation + self.communication + CONTEXT_BYTES

    def estimate(self, *, on_gpu: bool = True) -> Estimate:
        """Bytes on the device: on a GPU without fragmentation, with what is usual of it, and with twice that."""
        from hpctrain.control.predict.values import Estimate  # Imported here: a launcher needs no NumPy for memory.

        if not on_gpu:
            return Estimate(value=self.allocated, low=self.allocated, high=self.allocated)
        return Estimate(value=self.used, low=self.used - self.fragmentation, high=self.used + self.fragmentation)

    def fits(self, nbytes: float) -> bool:
        """Whether a device with so many bytes has room for what is predicted of a transformer."""
        return self.used <= USABLE * nbytes


def largest(moments: list[RankMemory]) -> RankMemory:
    """The moment at which tensors take most."""
    return max(moments, key=lambda memory: memory.allocated)


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
    """The bytes of one of the ranks that divide the state of some parameters, by the bytes of each one.

    Args:
        stage: 0 divides nothing, 1 the optimizer's state, 2 the gradients too, 3 the parameters too.
    """
    return StateBytes(
        parameters=parameters / (ranks if stage >= 3 else 1) * each.parameters,
        gradients=parameters / (ranks if stage >= 2 else 1) * each.gradients,
        optimizer=parameters / (ranks if stage >= 1 else 1) * each.optimizer,
    )


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """How a network is trained, as far as its memory depends on it.

    Attributes:
        precision: of the computation, as a recipe's.
        bucket_bytes: a recipe's ``communication.bucket_mb`` times 10^6; None for a training without ``ht.distribute``.
        in_place: of the engine: true for NCCL, Gloo, Horovod and one process, false for hpctrain's own over MPI.
        compressed: gradients travel in a narrower type, or few of them.
        parts: into which a step's batch is cut, whose gradients are added up; memory is that of one part.
        fused: PyTorch's own optimizers have one kernel for all, as in recipes. By default they update all parameters
            together, one operation after the other, as they do on a GPU if a script does not choose.
    """

    optimizer: Optimizer
    precision: Precision = "float32"
    bucket_bytes: float | None = BUCKET_BYTES
    in_place: bool = True
    compressed: bool = False
    parts: int = 1
    fused: bool = False

    @property
    def autocast(self) -> bool:
        """Whether activations are narrower than weights."""
        return self.precision != "float32"


def memory(workload: Workload, *, batch: int, settings: MemorySettings) -> RankMemory:
    """The memory of training a recorded network with so many samples at once on each device."""
    if batch < 1:
        raise HpctrainError("HT-option-bad-value", "a batch of {batch} samples", "at least 1", batch=batch)
    made: list[GradientBucket] = []
    if settings.bucket_bytes is not None:
        made = buckets(workload, settings.bucket_bytes, in_place=settings.in_place, compressed=settings.compressed)
    item = _ITEM_BYTES.get(workload.sample.dtype, 4)
    if workload.sample.dtype.startswith("float"):
        # Samples are not wider than weights.
        item = min(item, _WEIGHT_BYTES)
    always = {
        "parameters": workload.parameters * _WEIGHT_BYTES,
        "optimizer": settings.optimizer.rule.state_elements(settings.optimizer) * workload.parameters * _WEIGHT_BYTES,
        "buffers": workload.buffers * 4,
        "buckets": sum(bucket.nbytes for bucket in made if not bucket.in_place),
        "inputs": batch * math.prod(workload.sample.shape) * item,
    }
    alone = _unbucketed_gradients(workload, made)
    update = {"gradients": sum(alone), "temporary": _update_elements(workload, settings) * _WEIGHT_BYTES}
    moments = [*_passes(workload, batch, settings, alone), RankMemory(moment="update", tensors=update)]
    peak = largest(moments)
    return RankMemory(moment=peak.moment, tensors={**always, **peak.tensors})


def _update_elements(workload: Workload, settings: MemorySettings) -> int:
    """The elements that an update has in memory besides parameters, gradients and state."""
    optimizer = settings.optimizer
    if optimizer.name in ("adam", "adamw"):
        # The root of the mean of squares.
        return 0 if settings.fused else workload.parameters
    if optimizer.name == "sgd" and not optimizer.rate_in_momentum:
        # The sums of gradients and decay.
        needed = not settings.fused and (optimizer.weight_decay or optimizer.nesterov)
        return workload.parameters if needed else 0
    widest = max((elements for elements, _ in workload.registered), default=0)
    return optimizer.rule.temporary(optimizer) * max(widest, min(TOGETHER["cuda"], workload.parameters))


def _unbucketed_gradients(workload: Workload, made: list[GradientBucket]) -> list[int]:
    """The bytes of each layer's gradients that are in no bucket."""
    found = [sum(layer.parameters) * _WEIGHT_BYTES for layer in workload.layers]
    for bucket in made:
        for number in () if bucket.in_place else bucket.members:
            elements, layer = workload.registered[number]
            found[layer] -= elements * _WEIGHT_BYTES
    return found


def _passes(workload: Workload, batch: int, settings: MemorySettings, alone: list[int]) -> Iterator[RankMemory]:
    """What each layer's forward and backward pass has in memory besides what is there always.

    Temporary are activations and gradients between two layers, and a gradient before it is in its bucket; ``alone`` are
    the bytes of each layer's gradients that are in none.
    """
    layers, autocast = workload.layers, settings.autocast
    # Autocast keeps narrow copies of weights for the backward pass.
    narrow = [2 * layer.fixed_elements if autocast and layer.kind != "other" else 0 for layer in layers]
    kept = list(accumulate(_saved_bytes(layer, autocast=autocast) for layer in layers))
    copies = list(accumulate(narrow))
    fresh = [sum(layer.parameters) * _WEIGHT_BYTES for layer in layers]
    # Accumulated gradients are outside of the buckets until those of the last part are added.
    added = sum(fresh) if settings.parts > 1 else 0
    # When the backward pass reaches a layer, the layers behind it already have their gradients.
    after = sum(alone)
    # In a last part gradients that have been added up move into the buckets; with more parts those before keep all.
    moved = sum(fresh) - sum(alone) if settings.parts == 2 else 0
    for index, layer in enumerate(layers):
        item = 2 if autocast and layer.narrow else _WEIGHT_BYTES
        held = {"activations": batch * kept[index], "weight_copies": copies[index]}
        yield RankMemory(
            moment=f"forward {layer.name}",
            tensors={**held, "gradients": added, "temporary": batch * layer.transient_elements * item},
        )
        in_bucket = fresh[index] - alone[index]
        moved -= in_bucket if settings.parts == 2 else 0
        between = batch * layer.transient_backward_elements * item + layer.fixed_transient_elements * _WEIGHT_BYTES
        yield RankMemory(
            moment=f"backward {layer.name}",
            tensors={
                **held,
                "gradients": added - moved if added else after,
                "temporary": between + (fresh[index] if added else in_bucket) + narrow[index],
            },
        )
        after -= alone[index]


def _saved_bytes(layer: Layer, *, autocast: bool) -> int:
    return layer.saved_bytes + (layer.mixed_saved_bytes if autocast else layer.saved_elements * _WEIGHT_BYTES)

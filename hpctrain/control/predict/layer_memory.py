"""The memory of a training on one device, by what it holds, at the moment when it is most.

The steps of a workload's forward and backward pass are gone through in order: activations are kept and freed,
gradients appear, and the largest sum counts. Nothing is measured here; the unit tests hold the result against
``torch.distributed._tools.mem_tracker.MemTracker``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from hpctrain.common.bucket_groups import BUCKET_BYTES
from hpctrain.common.errors import HpctrainError
from hpctrain.common.optim.rules import TOGETHER
from hpctrain.common.recipes.optimizers import Optimizer
from hpctrain.common.workloads.workload import Layer, Workload, buckets

# float32, or autocast to bf16 or fp16, where weights and gradients stay float32.
Precision = Literal["float32", "bf16", "fp16"]

# Memory that CUDA's caching allocator loses to rounding and holes, as a share of that of the tensors: on an
# H100 5 to 20 %, by benchmarks/one_gpu.py. It rounds to 512 bytes, and takes 2 or 20 MiB at once
# (https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management).
FRAGMENTATION = 0.1
# The memory of a process's CUDA context (0.81 GB there) and of cuBLAS' and cuDNN's workspaces (0.06 to 0.2 GB). NCCL's
# buffers are not in it.
CONTEXT_BYTES = 930_000_000
_ITEM_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "int16": 2, "int64": 8, "float64": 8}
_LARGEST_BATCH = 1 << 24
# Bytes of an element of the weights, and of their gradients.
_WEIGHT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes at the moment when they are most, by what holds them.

    Attributes:
        moment: ``forward`` or ``backward`` with the name of a layer, or ``update``.
        gradients: those that lie by themselves; others lie in the buckets.
        optimizer_state: momentum and other state of the optimizer.
        model_buffers: such as the running statistics of batch normalisation.
        buckets: the buffers in which the engine reduces gradients.
        activations: kept for the backward pass.
        weight_copies: narrow ones that autocast keeps.
        temporary: in use at that moment only: activations and gradients between two layers, a gradient before it is
            in its bucket, what the optimizer needs for an update.
        margin: for what the allocator of a GPU cannot use (:data:`FRAGMENTATION`).
        context: a process's CUDA context and the workspaces of its libraries (:data:`CONTEXT_BYTES`).
    """

    moment: str
    parameters: int
    gradients: int
    optimizer_state: int
    model_buffers: int
    buckets: int
    inputs: int
    activations: int
    weight_copies: int
    temporary: int
    margin: int
    context: int

    @property
    def peak(self) -> int:
        """The bytes of all tensors, without those of the allocator, the context and workspaces."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer_state
            + self.model_buffers
            + self.buckets
            + self.inputs
            + self.activations
            + self.weight_copies
            + self.temporary
        )

    @property
    def total(self) -> int:
        """The memory that a GPU needs."""
        return self.peak + self.margin + self.context


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


def memory(workload: Workload, *, batch: int, settings: MemorySettings) -> Memory:
    """The memory of training with so many samples at once.

    Args:
        batch: samples that the device computes at once: of one part where gradients are accumulated.
    """
    if batch < 1:
        raise HpctrainError("HT-option-bad-value", "a batch of {batch} samples", "at least 1", batch=batch)
    resident = _resident(workload, batch, settings)
    moments = (*_passes(workload, batch, settings, resident), _update(workload, settings, resident))
    most = max(moments, key=lambda each: each.peak)
    return replace(most, margin=round(FRAGMENTATION * most.peak), context=CONTEXT_BYTES)


def largest_batch(workload: Workload, nbytes: float, settings: MemorySettings) -> int:
    """The most samples at once whose training fits into a device's memory, with the margin and the context.

    Raises:
        HpctrainError: not even one sample fits.
    """

    most = most_samples(lambda batch: memory(workload, batch=batch, settings=settings).total <= nbytes)
    if not most:
        wanted = memory(workload, batch=1, settings=settings).total
        raise HpctrainError(
            "HT-memory-exceeded",
            "training {workload} with one sample takes {gigabytes:.3g} GB, and the device has {available:.3g} GB",
            "choose bf16, an optimizer with less state, or a device with more memory",
            workload=workload.name,
            gigabytes=wanted / 1e9,
            available=nbytes / 1e9,
        )
    return most


def most_samples(fits: Callable[[int], bool]) -> int:
    """The most samples at once that fit, where fewer fit too; 0 if not even one does."""
    low, high = 0, 1
    while high < _LARGEST_BATCH and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _resident(workload: Workload, batch: int, settings: MemorySettings) -> Memory:
    """The memory that is in use all the time."""
    item = _WEIGHT_BYTES
    engine = 0
    if settings.bucket_bytes is not None:
        made = buckets(
            workload,
            settings.bucket_bytes,
            in_place=settings.in_place,
            compressed=settings.compressed,
            item_bytes=item,
        )
        engine = sum(each.nbytes for each in made if not each.in_place)
    sample = 1
    for length in workload.sample.shape:
        sample *= length
    input_bytes = _ITEM_BYTES.get(workload.sample.dtype, 4)
    return Memory(
        moment="",
        parameters=workload.parameters * item,
        gradients=0,
        optimizer_state=settings.optimizer.rule.state_elements(settings.optimizer) * workload.parameters * item,
        model_buffers=workload.buffers * 4,
        buckets=engine,
        inputs=batch * sample * (min(input_bytes, item) if workload.sample.dtype.startswith("float") else input_bytes),
        activations=0,
        weight_copies=0,
        temporary=0,
        margin=0,
        context=0,
    )


def _update(workload: Workload, settings: MemorySettings, resident: Memory) -> Memory:
    optimizer, item = settings.optimizer, _WEIGHT_BYTES
    plain_sgd = optimizer.name == "sgd" and not (optimizer.decoupled_decay or optimizer.rate_in_momentum)
    if optimizer.name in ("adam", "adamw"):
        # Temporary: the root of the mean of squares.
        temporary = 0 if settings.fused else workload.parameters
    elif plain_sgd:
        # Temporary: the sums of gradients and decay.
        needed = not settings.fused and (optimizer.weight_decay or optimizer.nesterov)
        temporary = workload.parameters if needed else 0
    else:
        largest = max((elements for elements, _ in workload.registered), default=0)
        temporary = optimizer.rule.temporary(optimizer) * max(largest, min(TOGETHER["cuda"], workload.parameters))
    gradients = sum(_unbucketed_gradients(workload, settings))
    return replace(resident, moment="update", gradients=gradients, temporary=temporary * item)


def _unbucketed_gradients(workload: Workload, settings: MemorySettings) -> list[int]:
    """The bytes of each layer's gradients that are in no bucket."""
    item = _WEIGHT_BYTES
    found = [sum(layer.parameters) * item for layer in workload.layers]
    if settings.bucket_bytes is None:
        return found
    for bucket in buckets(
        workload,
        settings.bucket_bytes,
        in_place=settings.in_place,
        compressed=settings.compressed,
        item_bytes=item,
    ):
        for number in () if bucket.in_place else bucket.members:
            elements, layer = workload.registered[number]
            found[layer] -= elements * item
    return found


def _passes(workload: Workload, batch: int, settings: MemorySettings, resident: Memory) -> Iterator[Memory]:
    """Each layer's forward and backward pass."""
    layers, item = workload.layers, _WEIGHT_BYTES
    kept = list(accumulate(_saved_bytes(layer, settings) for layer in layers))
    copies = list(accumulate(_copy_bytes(layer) if settings.autocast else 0 for layer in layers))
    fresh = [sum(layer.parameters) * item for layer in layers]
    alone = _unbucketed_gradients(workload, settings)
    # Accumulated gradients are outside of the buckets until those of the last part are added.
    added = sum(fresh) if settings.parts > 1 else 0
    for layer, activations, own in zip(layers, kept, copies, strict=True):
        yield replace(
            resident,
            moment=f"forward {layer.name}",
            gradients=added,
            activations=batch * activations,
            weight_copies=own,
            temporary=batch * layer.transient_elements * _activation_bytes(layer, settings),
        )
    # When the backward pass reaches a layer, the layers behind it already have their gradients.
    after = sum(alone)
    # In a last part gradients that have been added up move into the buckets; with more parts those before keep all.
    moved = sum(fresh) - sum(alone) if settings.parts == 2 else 0
    for index, layer in enumerate(layers):
        in_bucket = fresh[index] - alone[index]
        moved -= in_bucket if settings.parts == 2 else 0
        between = batch * layer.transient_backward_elements * _activation_bytes(layer, settings)
        narrow = _copy_bytes(layer) if settings.autocast else 0
        yield replace(
            resident,
            moment=f"backward {layer.name}",
            gradients=added - moved if added else after,
            activations=batch * kept[index],
            weight_copies=copies[index],
            temporary=between + layer.fixed_transient_elements * item + (fresh[index] if added else in_bucket) + narrow,
        )
        after -= alone[index]


def _saved_bytes(layer: Layer, settings: MemorySettings) -> int:
    if settings.autocast:
        return layer.mixed_saved_bytes + layer.saved_bytes
    return layer.saved_elements * _WEIGHT_BYTES + layer.saved_bytes


def _activation_bytes(layer: Layer, settings: MemorySettings) -> int:
    """Bytes of an element of the layer's output."""
    return 2 if settings.autocast and layer.narrow else _WEIGHT_BYTES


def _copy_bytes(layer: Layer) -> int:
    """Bytes of the narrow copies of a layer's weights that autocast keeps for the backward pass."""
    return 2 * layer.fixed_elements if layer.kind != "other" else 0

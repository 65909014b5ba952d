"""The memory of a training on one device, by the layers of its network.

The steps of a workload's forward and backward pass are gone through in order: activations are kept and freed,
gradients appear, and the largest sum counts. Nothing is measured here; the unit tests hold the result against
``torch.distributed._tools.mem_tracker.MemTracker``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from hpctrain.common.bucket_groups import BUCKET_BYTES
from hpctrain.common.errors import HpctrainError
from hpctrain.common.optim.rules import TOGETHER
from hpctrain.common.recipes.optimizers import Optimizer
from hpctrain.common.workloads.workload import GradientBucket, Layer, Workload, buckets
from hpctrain.control.predict.memory import RankMemory, largest

if TYPE_CHECKING:
    from hpctrain.control.predict.compute import Precision

_ITEM_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "int16": 2, "int64": 8, "float64": 8}
# Bytes of an element of the weights, and of their gradients: autocast leaves them as they are.
_WEIGHT_BYTES = 4


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

    def buckets(self, workload: Workload) -> list[GradientBucket]:
        """The buckets in which gradients are reduced."""
        if self.bucket_bytes is None:
            return []
        return buckets(workload, self.bucket_bytes, in_place=self.in_place, compressed=self.compressed)


def memory(workload: Workload, *, batch: int, settings: MemorySettings) -> RankMemory:
    """The memory of training with so many samples at once.

    Args:
        batch: samples that the device computes at once: of one part where gradients are accumulated.
    """
    if batch < 1:
        raise HpctrainError("HT-option-bad-value", "a batch of {batch} samples", "at least 1", batch=batch)
    made = settings.buckets(workload)
    always = {
        "parameters": workload.parameters * _WEIGHT_BYTES,
        "optimizer": settings.optimizer.rule.state_elements(settings.optimizer) * workload.parameters * _WEIGHT_BYTES,
        "buffers": workload.buffers * 4,
        "buckets": sum(bucket.nbytes for bucket in made if not bucket.in_place),
        "inputs": batch * math.prod(workload.sample.shape) * _sample_bytes(workload.sample.dtype),
    }
    alone = _unbucketed_gradients(workload, made)
    update = {"gradients": sum(alone), "temporary": _update_elements(workload, settings) * _WEIGHT_BYTES}
    moments = [*_passes(workload, batch, settings, alone), RankMemory(moment="update", tensors=update)]
    peak = largest(moments)
    return RankMemory(moment=peak.moment, tensors={**always, **peak.tensors})


def _sample_bytes(dtype: str) -> int:
    """Bytes of an element of the input, which is not wider than weights where it is floating point."""
    nbytes = _ITEM_BYTES.get(dtype, 4)
    return min(nbytes, _WEIGHT_BYTES) if dtype.startswith("float") else nbytes


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

    Temporary are activations and gradients between two layers, and a gradient before it is in its bucket.

    Args:
        alone: bytes of each layer's gradients that are in no bucket.
    """
    layers = workload.layers
    narrow = [_copy_bytes(layer) if settings.autocast else 0 for layer in layers]
    kept = list(accumulate(_saved_bytes(layer, settings) for layer in layers))
    copies = list(accumulate(narrow))
    fresh = [sum(layer.parameters) * _WEIGHT_BYTES for layer in layers]
    # Accumulated gradients are outside of the buckets until those of the last part are added.
    added = sum(fresh) if settings.parts > 1 else 0
    # When the backward pass reaches a layer, the layers behind it already have their gradients.
    after = sum(alone)
    # In a last part gradients that have been added up move into the buckets; with more parts those before keep all.
    moved = sum(fresh) - sum(alone) if settings.parts == 2 else 0
    for index, layer in enumerate(layers):
        item = _activation_bytes(layer, settings)
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

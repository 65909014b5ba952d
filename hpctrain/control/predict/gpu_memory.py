"""The memory that a prediction's ranks need, and the batches that fit into a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hpctrain.common.cluster.gpu_models import gpu
from hpctrain.common.errors import HpctrainError
from hpctrain.control.predict.compute import CPU
from hpctrain.control.predict.job import Job
from hpctrain.control.predict.layer_memory import Memory, MemorySettings, largest_batch, memory
from hpctrain.control.predict.training import Training
from hpctrain.control.predict.values import Estimate


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """The memory of one rank.

    Attributes:
        needed: bytes at the peak, from the tensors and a GPU's context alone to twice the margin for fragmentation.
        largest_batch: samples that a GPU can compute at once, 0 if not even one; None on hosts without.
        choices: bytes at the peak with what would make them fewer.
    """

    needed: Estimate
    largest_batch: int | None
    choices: Mapping[str, int]


def rank_memory(training: Training, job: Job) -> GpuMemory:
    """The memory of a rank at a training's largest images."""
    settings = MemorySettings(
        optimizer=training.optimizer,
        precision=training.precision,
        bucket_bytes=job.bucket_bytes if job.ranks > 1 else None,
        in_place=job.in_place,
        compressed=job.wire < 1,
        parts=job.parts,
        fused=True,
    )
    on_gpu = job.device.name != CPU
    found = memory(training.largest, batch=job.at_once, settings=settings)
    taken = _bytes_on_device(found, on_gpu=on_gpu)
    changes = {
        "half the samples at once": (-(-job.at_once // 2), replace(settings, parts=2 * settings.parts)),
        "bf16": (job.at_once, replace(settings, precision="bf16")),
    }
    choices = {
        name: _bytes_on_device(memory(training.largest, batch=batch, settings=changed), on_gpu=on_gpu)
        for name, (batch, changed) in changes.items()
    }
    context, margin = (found.context, found.margin) if on_gpu else (0, 0)
    return GpuMemory(
        needed=Estimate(value=taken, low=found.peak + context, high=taken + margin),
        largest_batch=_largest(training, job, settings) if on_gpu else None,
        choices={name: nbytes for name, nbytes in choices.items() if nbytes < taken},
    )


def _bytes_on_device(found: Memory, *, on_gpu: bool) -> int:
    """The bytes of a training, on a GPU with those of its allocator and context."""
    return found.total if on_gpu else found.peak


def _largest(training: Training, job: Job, settings: MemorySettings) -> int:
    try:
        return largest_batch(training.largest, gpu(job.device.name).memory_bytes, settings)
    except HpctrainError:
        return 0

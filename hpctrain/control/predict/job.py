"""One step of one training on so many nodes, as events: each bucket of gradients is reduced as soon as it is ready."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from hpctrain.common.bucket_groups import BUCKET_BYTES
from hpctrain.common.workloads.workload import Workload, buckets
from hpctrain.control.predict.allreduce_time import Ranks, allreduce
from hpctrain.control.predict.compute import CPU, Compute, compute
from hpctrain.control.predict.measurements import Calibration, Curve
from hpctrain.control.predict.values import Values
from hpctrain.control.topology.fabric import Floats


@dataclass(frozen=True, kw_only=True)
class Job(Ranks):
    """A training by some ranks, as far as the time of a step depends on it.

    Attributes:
        batch: samples of a rank in a step, and ``parts``: in which it computes them one after the other.
        state: numbers that the optimizer keeps of each parameter.
        samples_per_s: that the input pipeline of a rank makes, (columns,); None for as many as are wanted.
    """

    workload: Workload
    batch: float
    parts: int = 1
    bucket_bytes: float = BUCKET_BYTES
    state: int = 1
    samples_per_s: Floats | None = None

    @property
    def at_once(self) -> int:
        """The most samples that a rank computes together."""
        return math.ceil(self.batch / self.parts)

    @property
    def in_place(self) -> bool:
        """Whether the engine reduces large gradients where autograd put them."""
        return self.engine != "mpi"


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one step, (columns,) each, and those of one part of its batch.

    Attributes:
        unfed: of the step if its samples were always there, and ``busy``: in which the device is full.
        exposed: how much longer it is for its reductions, in which ranks also wait for the slowest one.
    """

    compute: Compute
    total: Floats
    unfed: Floats
    exposed: Floats
    busy: Floats


def times(job: Job, values: Values, measured: Calibration = Calibration()) -> Times:
    """The times of one step, as far as measurements correct them."""
    one = compute(job.workload, job.at_once, job.device, values, state=job.state)
    one = measured.corrected(one, job.at_once, values)
    jitter = values["cpu.jitter" if job.device.name == CPU else "jitter"] * slowest(job.count)
    last = one.total
    if job.count > 1:
        pace = np.minimum(values[f"{job.engine}.overlap"], 1.0)
        last = overlapped_step(one, _reductions(job, values, measured.curves), pace=pace, jitter=jitter)
    # Gradients are reduced in the last part only.
    unfed = (job.parts - 1) * (one.total - one.update) * (1 + jitter) + last
    total = unfed if job.samples_per_s is None else np.maximum(unfed, job.batch / job.samples_per_s)
    return Times(compute=one, total=total, unfed=unfed, exposed=last - one.total, busy=one.busy * job.parts)


def _reductions(job: Job, values: Values, curves: Sequence[Curve]) -> list[tuple[int, Floats]]:
    """For each bucket the layers whose backward pass is done when its reduction can begin, and the seconds of it."""
    made = buckets(job.workload, job.bucket_bytes, in_place=job.in_place, compressed=job.wire < 1)
    # Before Horovod reduces pass half a cycle on average, and the ranks' agreement.
    agreed = values["horovod.cycle_s"] / 2 + values["horovod.negotiation_s"] if job.engine == "horovod" else 0.0
    layers = len(job.workload.layers)
    return [(layers - bucket.launched, allreduce(bucket.nbytes, job, values, curves) + agreed) for bucket in made]


def overlapped_step(
    compute: Compute, reductions: Sequence[tuple[int, Floats]], *, pace: Floats, jitter: Floats
) -> Floats:
    """Seconds of one step of all ranks, (columns,).

    Args:
        reductions: in the order in which they are started, of which one runs at a time: the number of layers whose
            backward pass is done when it can begin, and the seconds of its all-reduce, (columns,).
        pace: how fast computing goes on while a reduction runs, 1 for undisturbed and 0 for not at all.
        jitter: what the slowest rank takes longer, as a share of the computing.
    """
    slower = 1 + jitter
    ready = np.cumsum(compute.backward, axis=0)
    now = compute.forward * slower
    done, free = np.zeros_like(now), np.zeros_like(now)
    for after, seconds in reductions:
        until = ready[after - 1]
        now = _advance(now, (until - done) * slower, free, pace)
        done = until
        free = np.maximum(now, free) + seconds
    now = _advance(now, (ready[-1] - done) * slower, free, pace)
    total: Floats = np.maximum(now, free) + compute.update
    return total


def _advance(now: Floats, work: Floats, free: Floats, pace: Floats) -> Floats:
    """When work is done that begins now, and goes on at ``pace`` until the reductions so far are done."""
    busy = np.maximum(free - now, 0)
    within = busy * pace
    # Where pace is 0 nothing is done within that time.
    slowed = now + work / np.maximum(pace, 1e-9)
    after: Floats = np.where(work <= within, slowed, now + busy + work - within)
    return after


def slowest(ranks: int) -> float:
    """By how many standard deviations the slowest of so many ranks is late on average (Blom 1958)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0

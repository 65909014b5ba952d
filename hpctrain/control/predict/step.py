"""One step as events: gradients become ready bucket by bucket, and are reduced while the rest is still computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from hpctrain.control.predict.compute import Compute
from hpctrain.control.topology.fabric import Floats


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """One bucket.

    Attributes:
        after: it begins when the backward pass of so many layers is done.
        seconds: the time of its all-reduce, (columns,).
    """

    after: int
    seconds: Floats


@dataclass(frozen=True, kw_only=True)
class Step:
    """Seconds of one step, (columns,) each.

    Attributes:
        exposed: how much longer it is for its reductions, in which ranks also wait for the slowest one.
    """

    total: Floats
    exposed: Floats


def step(compute: Compute, reductions: Sequence[Reduction], *, pace: Floats, jitter: Floats) -> Step:
    """One step of all ranks.

    Args:
        reductions: in the order in which they are started; one runs at a time.
        pace: how fast computing goes on while a reduction runs, 1 for undisturbed and 0 for not at all.
        jitter: what the slowest rank takes longer, as a share of the computing.
    """
    slower = 1 + jitter
    ready = np.cumsum(compute.backward, axis=0)
    now = compute.forward * slower
    done, free = np.zeros_like(now), np.zeros_like(now)
    for reduction in reductions:
        until = ready[reduction.after - 1]
        now = _advance(now, (until - done) * slower, free, pace)
        done = until
        free = np.maximum(now, free) + reduction.seconds
    now = _advance(now, (ready[-1] - done) * slower, free, pace)
    total = np.maximum(now, free) + compute.update
    return Step(total=total, exposed=total - compute.total)


def _advance(now: Floats, work: Floats, free: Floats, pace: Floats) -> Floats:
    """When work is done that begins now, and goes on at ``pace`` until the reductions so far are done."""
    busy = np.maximum(free - now, 0)
    within = busy * pace
    # Where pace is 0 nothing is done within that time.
    slowed = now + work / np.maximum(pace, 1e-9)
    after: Floats = np.where(work <= within, slowed, now + busy + work - within)
    return after


def slowest(ranks: int) -> float:
    """By how many standard deviations the slowest of so many ranks is late on average.

    Source: Blom 1958, expected values of normal order statistics.
    """
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0

"""The shares that simultaneous flows get of the links that they use together."""

from __future__ import annotations

import numpy as np

from hpctrain.common.errors import HpctrainError
from hpctrain.control.topology.fabric import Fabric, Floats, Ints
from hpctrain.control.topology.routes import Routes
from hpctrain.control.topology.traffic import Phase


def shares(
    routes: Routes, phase: Phase, rate: float, background: tuple[float, float] = (0.0, 0.0)
) -> tuple[float, float, float]:
    """The rate of the slowest flow of a phase, as a share of what an adapter alone would allow.

    Args:
        rate: of an adapter, bytes a second in one direction.
        background: the lowest and highest share of each link between switches that other jobs take.

    Returns:
        The share with other jobs' load at its high end, in the middle, and at its low end.
    """
    fabric = routes.fabric
    load: Floats = np.bincount(routes.paths(phase.source, phase.target).link, minlength=len(fabric.source)).astype(
        np.float64
    )
    between = (fabric.level[fabric.source] >= 1) & (fabric.level[fabric.target] >= 1)
    # Flows that the busiest adapter sends or receives.
    most = float(max(np.bincount(phase.source).max(), np.bincount(phase.target).max()))

    def share(taken: float) -> float:
        if not has_cables(fabric):
            return 1 - taken if load[between].any() else 1.0
        capacity = np.where(between, 1 - taken, 1.0) * (fabric.bandwidth if fabric.has_speeds else rate)
        slowest = float((load / capacity).max(initial=0.0))
        return min(1.0, most / rate / slowest) if slowest else 1.0

    low, high = background
    return share(high), share((low + high) / 2), share(low)


def has_cables(fabric: Fabric) -> bool:
    """Whether the listing has every cable; Slurm's topology has one line for any number of cables."""
    return fabric.has_speeds or bool(fabric.lid.any())


def rail_rate(fabric: Fabric, adapters: Ints, stated: float | None) -> float:
    """Bytes a second of one adapter in one direction: as stated, else of the fastest of their cables.

    Raises:
        HpctrainError: the rate is none, or neither stated nor in the fabric.
    """
    if stated is not None:
        if not 0 < stated < float("inf"):
            raise HpctrainError(
                "HT-network-bad-number",
                "an adapter with bytes_per_s={rate}",
                "it must be greater than 0, such as 25e9",
                rate=stated,
            )
        return stated
    if not fabric.has_speeds:
        raise HpctrainError(
            "HT-fabric-no-speeds",
            "the fabric's listing has no speeds of links",
            "state the rate of an adapter as well, such as --link 200Gb",
        )
    return float(fabric.bandwidth[np.isin(fabric.source, adapters)].max())

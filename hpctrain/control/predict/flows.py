"""The shares that simultaneous flows get of the links that they use together."""

from __future__ import annotations

import numpy as np

from hpctrain.common.errors import HpctrainError
from hpctrain.control.topology.fabric import Fabric, Floats, Ints
from hpctrain.control.topology.routes import Routes
from hpctrain.control.topology.traffic import Phase


class Flows:
    """The flows of one phase, and how many are on each link.

    Attributes:
        own: flows that the busiest adapter sends or receives.
        load: flows on each directed link.
    """

    def __init__(self, fabric: Fabric, routes: Routes, phase: Phase) -> None:
        paths = routes.paths(phase.source, phase.target)
        self._fabric = fabric
        self.load: Floats = np.bincount(paths.link, minlength=len(fabric.source)).astype(np.float64)
        self.own = float(max(np.bincount(phase.source).max(), np.bincount(phase.target).max()))

    def shares(self, rate: float, background: tuple[float, float]) -> tuple[float, float, float]:
        """The rate of the slowest flow, as a share of what an adapter alone would allow.

        Args:
            rate: of an adapter, bytes a second in one direction.
            background: the lowest and highest share of each link between switches that other jobs take.

        Returns:
            The share with other jobs' load at its high end, in the middle, and at its low end.
        """
        low, high = background
        return self._share(rate, high), self._share(rate, (low + high) / 2), self._share(rate, low)

    def _share(self, rate: float, taken: float) -> float:
        fabric = self._fabric
        between = (fabric.level[fabric.source] >= 1) & (fabric.level[fabric.target] >= 1)
        if not has_cables(fabric):
            return 1 - taken if self.load[between].any() else 1.0
        capacity = np.where(between, 1 - taken, 1.0) * (fabric.bandwidth if fabric.has_speeds else rate)
        slowest = float((self.load / capacity).max(initial=0.0))
        return min(1.0, self.own / rate / slowest) if slowest else 1.0


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

"""The figures of a training on each number of nodes, each with its range, from the time of a step and what it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpctrain.control.predict.compute import CPU
from hpctrain.control.predict.values import Estimate, Values, estimate

if TYPE_CHECKING:
    from hpctrain.control.predict.network import Network
    from hpctrain.control.predict.values import Cause, Constant
    from hpctrain.control.topology.fabric import Floats

# Ports of switches for each adapter: of a fat tree with two levels, one at the leaf and two above it.
SWITCH_PORTS = 3.0
_JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, kw_only=True)
class Site:
    """The site's power over that of its machines, and its grid's grams of CO2 equivalent, None if not known."""

    pue: float = 1.0
    g_per_kwh: float | None = None


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of the cluster, whose nodes are all alike.

    Attributes:
        local: ranks, each with a GPU of its own, or on ``cpu`` together on the cores.
        rdma: whether its adapters have it; else NCCL uses sockets.
    """

    gpu: str
    local: int
    engine: str
    rdma: bool = True


@dataclass(frozen=True, kw_only=True)
class Row:
    """The prediction for one number of nodes; docs/prediction.md explains the figures.

    Attributes:
        batch_per_gpu: samples of a step of the rank that has most, of which it computes ``at_once`` together.
        efficiency: samples per second and node, against those of the recipe on one node.
        epochs: to the result; None for a script, like all that follows from the length of a run.
        largest_batch: samples that a GPU can compute at once; None on hosts without, which have no energy either.
        tokens_per_s: of text; None for images, like all that follows.
        step_terms, memory_terms: seconds of a step, and bytes of the rank that needs most, by cause.
        limited_by: the largest of the step's terms.
    """

    nodes: int
    gpus: int
    batch_per_gpu: float
    at_once: int
    step_s: Estimate
    samples_per_s: Estimate
    efficiency: Estimate
    communication_share: Estimate
    epochs: Estimate | None
    epochs_source: str | None
    minutes: Estimate | None
    memory_bytes: Estimate
    largest_batch: int | None
    node_w: Estimate | None
    kwh: Estimate | None
    facility_kwh: Estimate | None
    joules_per_sample: Estimate | None
    kg_co2: Estimate | None
    tokens_per_s: Estimate | None = None
    layout: Mapping[str, Any] | None = None
    step_terms: Mapping[str, float] = field(default_factory=dict)
    memory_terms: Mapping[str, float] = field(default_factory=dict)
    limited_by: str | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Rows by nodes, and what they rest on.

    Attributes:
        constants: that the figures depend on, by name.
        causes: the constants that matter most for the step of the last row, by their share.
        candidates: of a search for the best mesh, those of the last row, the fastest first.
    """

    name: str
    node: Node
    rows: tuple[Row, ...]
    constants: Mapping[str, Constant]
    causes: tuple[Cause, ...]
    warnings: tuple[str, ...]
    candidates: tuple[Row, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a run is, (columns,) each, and where the number of epochs is from."""

    epochs: Floats
    source: str
    seconds: Floats


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training on one number of nodes; (columns,) where nothing else is said.

    Attributes:
        batch: samples of a step over all ranks, which ``data_ranks`` divide.
        batch_per_gpu: see :class:`Row`, like ``at_once``.
        total: seconds of a step.
        waits: share of the step in which ranks wait for each other's bytes.
        busy: share of the step in which GPUs are full.
        tokens: of a sample; None for images.
        figures: the others of a row.
    """

    node: Node
    network: Network
    batch: int
    data_ranks: int
    batch_per_gpu: float
    at_once: int
    total: Floats
    waits: Floats
    busy: Floats
    length: Length | None
    figures: Mapping[str, Any]
    tokens: int | None = None

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.network.hosts * self.node.local

    @property
    def samples_per_s(self) -> Floats:
        """The throughput of all ranks."""
        found: Floats = self.batch / self.total
        return found

    def row(self, reference: Floats, values: Values, site: Site) -> Row:
        """The figures of these nodes, with an efficiency against samples a second and node."""
        length, nodes = self.length, self.network.hosts
        power: dict[str, Floats] = {}
        if self.node.gpu != CPU:
            power = energy(
                values,
                self.node,
                nodes,
                switch_ports=SWITCH_PORTS * self.network.rails * nodes if nodes > 1 else 0.0,
                busy=self.busy,
                seconds=None if length is None else length.seconds,
                samples_per_s=self.samples_per_s,
                site=site,
            )
        figures: dict[str, Any] = {name: estimate(power[name]) if name in power else None for name in _ENERGY} | dict(
            self.figures
        )
        return Row(
            nodes=nodes,
            gpus=self.ranks,
            batch_per_gpu=self.batch_per_gpu,
            at_once=self.at_once,
            step_s=estimate(self.total),
            samples_per_s=estimate(self.samples_per_s),
            tokens_per_s=None if self.tokens is None else estimate(self.samples_per_s * self.tokens),
            efficiency=estimate(self.samples_per_s / nodes / reference),
            communication_share=estimate(self.waits),
            epochs=None if length is None else estimate(length.epochs),
            epochs_source=None if length is None else length.source,
            minutes=None if length is None else estimate(length.seconds / 60),
            **figures,
        )


_ENERGY = ("node_w", "kwh", "facility_kwh", "joules_per_sample", "kg_co2")


def energy(
    values: Values,
    node: Node,
    nodes: int,
    *,
    busy: Floats,
    seconds: Floats | None,
    samples_per_s: Floats,
    switch_ports: float = 0.0,
    site: Site = Site(),
) -> dict[str, Floats]:
    """The power and energy of a run's nodes on GPUs, (columns,) each; ``facility_kwh`` is with switches and PUE.

    A GPU draws its idle power, and what is between that and a share of its limit for as long as it is full. The rest
    of a node (cores, memory, fans) draws what GPUs at their full power leave of its share, whatever they do.

    Args:
        busy: share of the time for which GPUs are full, (columns,).
        seconds: of the run, (columns,); None if not known, for which only ``node_w`` and ``joules_per_sample`` follow.
        switch_ports: the number of ports of all switches together.
    """
    gpu = node.gpu
    idle, full = values[f"{gpu}.idle_w"], values[f"{gpu}.power_w"] * values["full_power"]
    share = values["gpu_power_share"].clip(max=0.95)
    rest = node.local * full * (1 - share) / share
    node_w = rest + node.local * (idle + (full - idle) * busy)
    found = {"node_w": node_w, "joules_per_sample": node_w * nodes / samples_per_s}
    if seconds is None:
        return found
    found["kwh"] = node_w * nodes * seconds / _JOULES_PER_KWH
    switches = values["switch_port_w"] * switch_ports * seconds / _JOULES_PER_KWH
    found["facility_kwh"] = (found["kwh"] + switches) * site.pue
    if site.g_per_kwh is not None:
        found["kg_co2"] = found["facility_kwh"] * site.g_per_kwh / 1000
    return found


def nodes_text(nodes: Sequence[int]) -> str:
    """Numbers of nodes in words, such as ``1, 2 nodes``."""
    return f"{', '.join(map(str, nodes))} node{'s' if list(nodes) != [1] else ''}"

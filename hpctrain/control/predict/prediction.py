"""The figures of a training on each number of nodes, each with its range, from the time of a step and what it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hpctrain.control.predict.compute import CPU
from hpctrain.control.predict.node_energy import FIGURES, Machines, Site, energy
from hpctrain.control.predict.values import Estimate, Values, estimate

if TYPE_CHECKING:
    from hpctrain.control.predict.causes import Cause
    from hpctrain.control.predict.constants import Constant
    from hpctrain.control.predict.network import Network
    from hpctrain.control.topology.fabric import Floats

# Ports of switches for each adapter: of a fat tree with two levels, one at the leaf and two above it.
SWITCH_PORTS = 3.0


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of the cluster, whose nodes are all alike.

    Attributes:
        gpu: a name of :func:`hpctrain.common.cluster.gpu_models.gpus`, or ``cpu``.
        local: ranks, each with a GPU of its own, or together on the cores.
        rdma: whether its adapters have it; else NCCL uses sockets.
    """

    gpu: str
    local: int
    engine: str
    rdma: bool = True


@dataclass(frozen=True, kw_only=True)
class Row:
    """The prediction for one number of nodes.

    Attributes:
        batch_per_gpu: samples of a step of the rank that has most.
        at_once: samples that a rank computes together.
        samples_per_s: the throughput of all ranks together.
        efficiency: samples per second and node, against those of the recipe on one node.
        communication_share: what of a step is waiting for reductions.
        epochs: to the result, and ``epochs_source``: where they are from; None for a script, like all that follows
            from the length of a run.
        minutes: the time of the run with validation and checkpoints.
        memory_bytes: the memory in use on a GPU at its peak.
        largest_batch: samples that a GPU can compute at once; None on hosts without.
        memory_choices: bytes at the peak with what would make them fewer.
        kwh, facility_kwh, joules_per_sample, node_w, kg_co2: see
            :class:`hpctrain.control.predict.node_energy.Energy`; None for hosts without GPUs.
        tokens_per_s: of text; None for images, like all that follows.
        layout: of a transformer: the ranks along each axis, micro-batches, schedule, and what is computed again.
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
    memory_choices: Mapping[str, int]
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
        worthwhile: the nodes beyond which another one adds less than half of the throughput of the first; None if all
            in the range add more.
        constants: that the figures depend on, by name, with what a calibration made of them.
        causes: the constants that matter most for the step of the last row, by their share.
        candidates: of a search for the best mesh, those of the last row, the fastest first.
    """

    name: str
    node: Node
    rows: tuple[Row, ...]
    worthwhile: int | None
    constants: Mapping[str, Constant]
    causes: tuple[Cause, ...]
    warnings: tuple[str, ...]
    candidates: tuple[Row, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a run is, (columns,) each.

    Attributes:
        source: where the number of epochs is from.
    """

    epochs: Floats
    source: str
    seconds: Floats


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training on one number of nodes; (columns,) where nothing else is said.

    Attributes:
        batch: samples of a step over all ranks.
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
        """The figures of these nodes.

        Args:
            reference: samples a second and node that efficiency is against.
        """
        length, nodes = self.length, self.network.hosts
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
            **self._energy(values, site),
            **self.figures,
        )

    def _energy(self, values: Values, site: Site) -> dict[str, Any]:
        """The figures of a row about energy."""
        nodes = self.network.hosts
        if self.node.gpu == CPU:
            return dict.fromkeys(FIGURES)
        found = energy(
            values,
            Machines(
                gpu=self.node.gpu,
                gpus_per_node=self.node.local,
                nodes=nodes,
                switch_ports=SWITCH_PORTS * self.network.rails * nodes if nodes > 1 else 0.0,
            ),
            busy=self.busy,
            seconds=None if self.length is None else self.length.seconds,
            samples_per_s=self.samples_per_s,
            site=site,
        )
        return {name: None if columns is None else estimate(columns) for name, columns in vars(found).items()}


def worthwhile(rates: Sequence[tuple[int, float]]) -> int | None:
    """The last number of nodes up to which each one more adds at least half of what the first one does.

    Args:
        rates: numbers of nodes, rising, and what they do in a second.
    """
    half = rates[0][1] / rates[0][0] / 2
    for (nodes, rate), (more, faster) in pairwise(rates):
        if (faster - rate) / (more - nodes) < half:
            return nodes
    return None


def idle_warnings(nodes: Sequence[int]) -> list[str]:
    """What is said about the numbers of nodes that have more ranks than samples."""
    what = "there are more ranks than samples in a step, so some have none"
    return [f"on {nodes_text(nodes[:1])} {what}"] if nodes else []


def nodes_text(nodes: Sequence[int]) -> str:
    """Numbers of nodes in words, such as ``1, 2 nodes``."""
    return f"{', '.join(map(str, nodes))} node{'s' if list(nodes) != [1] else ''}"

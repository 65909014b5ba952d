"""How long an all-reduce takes by each engine, between the ranks of a node and between nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hpctrain.common.cluster.gpu_models import buses, gpu
from hpctrain.control.predict.compute import CPU, Device
from hpctrain.control.predict.measurements import Curve, interpolated
from hpctrain.control.predict.network import stated_network
from hpctrain.control.predict.values import Values
from hpctrain.control.topology.fabric import Floats

if TYPE_CHECKING:
    from hpctrain.control.predict.network import Network

# UCX sends one message over at most so many adapters (UCX_MAX_RNDV_RAILS, https://openucx.readthedocs.io).
_MPI_RAILS = 2
# Bytes that an all-reduce of one byte moves through the memory of a host with p ranks, by engine: hpctrain's own reads
# every rank's and writes the result, which every rank reads; a ring sends 2 (p - 1) / p of it p times, through a socket
# with a copy at each end (Gloo), or through shared memory with Horovod's fusion buffer before and after (Horovod).
_VOLUMES: dict[str, tuple[float, float]] = {"mpi": (2.0, 1.0), "gloo": (6.0, -6.0), "horovod": (4.0, -2.0)}

Algorithm = Literal["ring", "tree"]

# Copies of a byte that is sent: read from the buffer and written to a socket or device, and the same at the other end.
_WIRE_COPIES = 4


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks of an all-reduce, and how they reduce.

    Attributes:
        device: of each rank.
        engine: ``nccl``, ``horovod``, ``mpi`` or ``gloo``.
        rdma: the adapters write into the other node's memory by themselves; else NCCL uses sockets.
        trees: whether NCCL has trees, as since 2.4; before, it has rings alone.
        wire: what a gradient takes on the way, as a share of its own bytes.
    """

    network: Network
    local: int
    device: Device
    engine: str
    rdma: bool = True
    trees: bool = True
    wire: float = 1.0

    @property
    def count(self) -> int:
        """The number of all ranks."""
        return self.network.hosts * self.local

    @property
    def by_nccl(self) -> bool:
        """Whether NCCL moves the bytes: Horovod calls it for GPUs."""
        return self.device.name != CPU and self.engine in ("nccl", "horovod")

    @property
    def measured_as(self) -> str:
        """The engine name of the curves that measure such ranks."""
        return "nccl" if self.by_nccl else self.engine


def over_nvlink(ranks: Ranks) -> Ranks:
    """The ranks, as of one node where NVLink joins all of them, as it does those of a rack."""
    if ranks.by_nccl and ranks.count <= gpu(ranks.device.name).rack:
        return replace(ranks, network=replace(ranks.network, hosts=1, placed=None), local=ranks.count)
    return ranks


def allreduce(nbytes: float, ranks: Ranks, values: Values, curves: Sequence[Curve] = ()) -> Floats:
    """Seconds of one all-reduce, (columns,).

    A curve that was measured on several hosts corrects the whole: the model only says how much longer these ranks take
    than those of the curve, and what both have in common drops out. One of a single host corrects what is within hosts,
    and one of a single rank of each of several hosts what is between them. Beyond the sizes of a curve its first or
    last one counts.

    Args:
        nbytes: the size of each rank's buffer.
        curves: that were measured; the one of the most similar ranks counts.
    """
    ranks = over_nvlink(ranks)
    if ranks.count == 1:
        return np.zeros(values.columns)
    inside = _nearest(ranks, [curve for curve in curves if curve.hosts == 1])
    if ranks.network.hosts == 1:
        return _within(nbytes, ranks, values) * _correction(nbytes, ranks, values, inside)
    between = _nearest(ranks, [curve for curve in curves if curve.hosts > 1])
    within, wire = _within(nbytes, ranks, values), _between(nbytes, ranks, values)
    if between is None or (ranks.by_nccl and between.local == 1):
        # This curve does not include the part within hosts.
        within = within * _correction(nbytes, ranks, values, inside)
        return _together(within, wire * _correction(nbytes, ranks, values, between), ranks)
    return _together(within, wire, ranks) * _correction(nbytes, ranks, values, between)


def _together(within: Floats, between: Floats, ranks: Ranks) -> Floats:
    """NCCL pipelines what is within nodes and between them, so that the slower of the two counts."""
    found: Floats = np.maximum(within, between) if ranks.by_nccl else within + between
    return found


def _nearest(ranks: Ranks, curves: Sequence[Curve]) -> Curve | None:
    return min(
        (curve for curve in curves if curve.engine == ranks.measured_as and curve.ranks > 1),
        key=lambda curve: (
            abs(math.log(curve.local / ranks.local)),
            abs(math.log(curve.hosts / ranks.network.hosts)),
        ),
        default=None,
    )


def _correction(nbytes: float, ranks: Ranks, values: Values, curve: Curve | None) -> Floats:
    """The factor by which a curve exceeds the model at this size, (columns,).

    It is assumed that no other job used the network while the curve was measured.
    """
    if curve is None:
        return np.ones(values.columns)
    size = min(max(nbytes, curve.points[0][0]), curve.points[-1][0])
    said = modelled_seconds(size, ranks, values, curve)
    found: Floats = curve.at(size) / said * np.exp(values.log_factor("curve_residual"))
    return found


def modelled_seconds(nbytes: float, ranks: Ranks, values: Values, curve: Curve) -> Floats:
    """Seconds that the model predicts for an all-reduce as a curve measured it, (columns,)."""
    network = stated_network(curve.hosts, **_adapters_of(curve, ranks))
    measured = replace(ranks, network=network, local=curve.local, wire=1.0)
    said = _within(nbytes, measured, values)
    return _together(said, _between(nbytes, measured, values), measured) if curve.hosts > 1 else said


def _adapters_of(curve: Curve, ranks: Ranks) -> dict[str, Any]:
    """Number and rate of the adapters that a curve had of each host, by ``ranks``' network."""
    rate = curve_rate(curve, ranks)
    adapters = max(1, math.floor(rate / ranks.network.rail_bytes_per_s + 1e-9))
    return {"adapters": adapters, "bytes_per_s": rate / adapters}


def curve_rate(curve: Curve, ranks: Ranks) -> float:
    """Bytes a second, in one direction, of the adapters of a host that the ranks of a curve used.

    NCCL has each GPU use the adapters that are nearest to it, so that some of a node's GPUs use some of its adapters,
    but whole ones: one of eight GPUs with two adapters has one of these to itself.
    """
    network = ranks.network
    share = min(1.0, curve.local / ranks.local) if ranks.by_nccl else 1.0
    return math.ceil(network.rails * share - 1e-9) * network.rail_bytes_per_s


def _within(nbytes: float, ranks: Ranks, values: Values) -> Floats:
    """Seconds within a node, (columns,); all engines but hpctrain's own use the wire format there too."""
    if ranks.by_nccl:
        return _over_bus(nbytes * ranks.wire, ranks, values)
    return _through_memory(nbytes * (1.0 if ranks.engine == "mpi" else ranks.wire), ranks, values)


def _between(nbytes: float, ranks: Ranks, values: Values) -> Floats:
    """Seconds between nodes, (columns,)."""
    sent = nbytes * ranks.wire
    return _nccl_between(sent, ranks, values) if ranks.by_nccl else _hosts_between(sent, ranks, values)


def _nccl_between(nbytes: float, ranks: Ranks, values: Values) -> Floats:
    """Seconds of ring or trees: NCCL's tuner is taken to choose what is faster where no link is shared, as it does not
    know the fabric.
    """
    network = ranks.network
    reached = values["wire_efficiency" if ranks.rdma else "tcp.wire_efficiency"]
    alone = reached[0] * network.rails * network.rail_bytes_per_s
    step_s = values["nccl_step_s"]

    def unshared(algorithm: Algorithm) -> float:
        # The tuner counts two buffers in the trees of any number of nodes, also of two, which send each other one.
        volume = 2.0 if algorithm == "tree" else _volume(ranks, algorithm)
        return float(_steps(ranks, algorithm) * step_s[0] + volume * nbytes / alone)

    algorithm: Algorithm = min(("ring", "tree"), key=unshared) if ranks.trees else "ring"
    share = network.ring_share if algorithm == "ring" else network.tree_share
    rate = reached * network.rails * network.rail_bytes_per_s * share
    seconds: Floats = _steps(ranks, algorithm) * step_s + _volume(ranks, algorithm) * nbytes / rate
    return seconds


def _steps(ranks: Ranks, algorithm: Algorithm) -> float:
    """How many messages between nodes follow each other."""
    hosts = ranks.network.hosts
    return 2 * (hosts - 1) if algorithm == "ring" else 2 * (hosts - 1).bit_length()


def _volume(ranks: Ranks, algorithm: Algorithm) -> float:
    """Buffers that a node's adapters send. Rings pass all GPUs of a node before they leave it."""
    return 2 * (ranks.count - 1) / ranks.count if algorithm == "ring" else ranks.network.tree_volume


def _over_bus(nbytes: float, ranks: Ranks, values: Values) -> Floats:
    """Seconds of an all-reduce by NCCL among the GPUs of one node, (columns,)."""
    if ranks.local == 1:
        return np.zeros(values.columns)
    name = gpu(ranks.device.name).bus
    points = buses()[name].points
    # A buffer smaller than all that were measured takes as long as the smallest.
    rate = interpolated(points, nbytes) * min(1.0, nbytes / points[0][0])
    share = 2 * (ranks.local - 1) / ranks.local
    seconds: Floats = share * nbytes / rate * np.exp(values.log_factor(f"bus.{name}"))
    return seconds


def _hosts_between(nbytes: float, ranks: Ranks, values: Values) -> Floats:
    """Seconds between hosts of engines that reduce in host memory, (columns,).

    hpctrain's own engine reduces between nodes alone, the others between all ranks.

    What a host sends and receives also passes through its memory, which counts where links are fast.
    """
    network = ranks.network
    rails = min(network.rails, _MPI_RAILS) if ranks.engine == "mpi" else 1
    rate = values[f"{ranks.engine}.wire_efficiency"] * rails * network.rail_bytes_per_s * network.ring_share
    members = network.hosts if ranks.engine == "mpi" else ranks.count
    if ranks.engine == "mpi" and members == 2:
        # Two hosts exchange everything in one step.
        steps = 1
    elif ranks.engine == "gloo":
        steps = 2 * (members - 1)
    else:
        steps = 2 * (members - 1).bit_length()
    volume = 2 * (members - 1) / members * nbytes
    memory = _WIRE_COPIES * volume / values["host_memory_bytes_per_s"]
    seconds: Floats = steps * values[f"{ranks.engine}.step_s"] + volume / rate + memory
    return seconds


def _through_memory(nbytes: float, ranks: Ranks, values: Values) -> Floats:
    """Seconds of a reduction in the memory of one host, with the copies from and to GPUs, (columns,)."""
    copied = np.zeros(values.columns) if ranks.device.name == CPU else 2 * nbytes / values["host_copy_bytes_per_s"]
    if ranks.local == 1:
        return copied
    slope, constant = _VOLUMES[ranks.engine]
    volume = slope * ranks.local + constant
    reduced = values[f"{ranks.engine}.local_s"] * ranks.local + volume * nbytes / values["host_memory_bytes_per_s"]
    seconds: Floats = copied + reduced
    return seconds

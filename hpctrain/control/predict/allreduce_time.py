"""How long an all-reduce takes by each engine, between the ranks of a node and between nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.common.cluster.gpu_models import buses, gpu
from hpctrain.common.errors import HpctrainError
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

# Copies of a byte that is sent: read from the buffer and written to a socket or device, and the same at the other end.
_WIRE_COPIES = 4
# No algorithm moves an all-reduce between hosts in less time than each needs to send its buffer once. The margin is for
# rates that are rounded up, and for times that are means over ranks.
_FASTER = 1.05


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks of an all-reduce, and how they reduce.

    Attributes:
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
        curves: that were measured; the one of the most similar ranks counts.
    """
    ranks = over_nvlink(ranks)
    if ranks.count == 1:
        return np.zeros(values.columns)
    inside = _nearest(ranks, [curve for curve in curves if curve.hosts == 1])
    between = _nearest(ranks, [curve for curve in curves if curve.hosts > 1])
    if ranks.network.hosts > 1 and between is not None and not (ranks.by_nccl and between.local == 1):
        return _modelled(nbytes, ranks, values) * _correction(nbytes, ranks, values, between)
    # A curve of one rank of each host does not include the part within hosts.
    within = _within(nbytes, ranks, values) * _correction(nbytes, ranks, values, inside)
    if ranks.network.hosts == 1:
        return within
    wire = _between(nbytes, ranks, values) * _correction(nbytes, ranks, values, between)
    return _together(within, wire, ranks)


def _modelled(nbytes: float, ranks: Ranks, values: Values) -> Floats:
    within = _within(nbytes, ranks, values)
    return within if ranks.network.hosts == 1 else _together(within, _between(nbytes, ranks, values), ranks)


def _together(within: Floats, between: Floats, ranks: Ranks) -> Floats:
    """NCCL pipelines what is within nodes and between them, so that the slower of the two counts."""
    found: Floats = np.maximum(within, between) if ranks.by_nccl else within + between
    return found


def _nearest(ranks: Ranks, curves: Sequence[Curve]) -> Curve | None:
    def distance(curve: Curve) -> tuple[float, float]:
        return abs(math.log(curve.local / ranks.local)), abs(math.log(curve.hosts / ranks.network.hosts))

    return min(
        (each for each in curves if each.engine == ranks.measured_as and each.ranks > 1), key=distance, default=None
    )


def _correction(nbytes: float, ranks: Ranks, values: Values, curve: Curve | None) -> Floats:
    """The factor by which a curve exceeds the model at this size, by ``ranks``' adapters, (columns,).

    It is assumed that no other job used the network while the curve was measured.
    """
    if curve is None:
        return np.ones(values.columns)
    size = min(max(nbytes, curve.points[0][0]), curve.points[-1][0])
    rate = curve_rate(curve, ranks)
    adapters = max(1, math.floor(rate / ranks.network.rail_bytes_per_s + 1e-9))
    network = stated_network(curve.hosts, adapters=adapters, bytes_per_s=rate / adapters)
    modelled = _modelled(size, replace(ranks, network=network, local=curve.local, wire=1.0), values)
    found: Floats = curve.at(size) / modelled * np.exp(values.log_factor("curve_residual"))
    return found


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
    rate = values["wire_efficiency" if ranks.rdma else "tcp.wire_efficiency"] * network.rails * network.rail_bytes_per_s
    step_s = values["nccl_step_s"]
    # Messages that follow each other, and buffers that a node's adapters send: rings pass all GPUs of a node before
    # they leave it.
    ring_steps, tree_steps = 2 * (network.hosts - 1), 2 * (network.hosts - 1).bit_length()
    ring_volume = 2 * (ranks.count - 1) / ranks.count
    # The tuner counts two buffers in the trees of any number of nodes, also of two, which send each other one.
    ring, tree = (
        steps * step_s[0] + volume * nbytes / rate[0] for steps, volume in ((ring_steps, ring_volume), (tree_steps, 2))
    )
    seconds: Floats
    if ranks.trees and tree < ring:
        seconds = tree_steps * step_s + network.tree_volume * nbytes / (rate * network.tree_share)
    else:
        seconds = ring_steps * step_s + ring_volume * nbytes / (rate * network.ring_share)
    return seconds


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

    hpctrain's own engine reduces between nodes alone, the others between all ranks. What a host sends and receives also
    passes through its memory, which counts where links are fast.
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


def check_curves(curves: Sequence[Curve], ranks: Ranks, *, stated: bool) -> list[str]:
    """Refuse curves that contradict the nodes of a prediction, and say what is doubtful about the others.

    Args:
        ranks: of the prediction, on as many nodes as any; only curves of their engine count.
        stated: whether adapters and their rate were stated. A contradiction to assumed ones is a warning.
    """
    used = [curve for curve in curves if curve.engine == ranks.measured_as and curve.ranks > 1]
    faults = [fault for curve in used if curve.hosts > 1 and (fault := _fault_of_links(curve, ranks))]
    if faults and stated:
        raise faults[0]
    warnings = [f"{fault.message}, as is assumed: {fault.hint}" for fault in faults]
    local, wanted = sorted({curve.local for curve in used}), over_nvlink(ranks).local
    if local and wanted not in local:
        measured = " and ".join(map(str, local)) + (" rank" if local == [1] else " ranks")
        warnings.append(f"all-reduces were measured with {measured} of a node, and {wanted} are predicted")
    return warnings


def _fault_of_links(curve: Curve, ranks: Ranks) -> HpctrainError | None:
    """Why the links cannot have carried a curve."""
    size, seconds = min(curve.points, key=lambda point: point[1] / point[0])
    sent, links = size / seconds, curve_rate(curve, ranks)
    if ranks.by_nccl:
        # The hosts of a rack share what leaves it.
        sent /= max(1, gpu(ranks.device.name).rack // curve.local)
    if sent <= _FASTER * links:
        return None
    return HpctrainError(
        "HT-calibration-implausible",
        "--calibration {source}: each of {hosts} hosts sent at least {rate}, and the adapters that {ranks} use carry "
        "{links}",
        "state the adapters and links that were measured (--adapters-per-node, --link); or its hosts are one machine "
        "under several names, or not all of the ranks are listed",
        source=curve.source,
        hosts=curve.hosts,
        rate=f"{sent / 1e9:.3g} GB/s",
        ranks=f"{curve.local} of {ranks.local} ranks of a node" if curve.local < ranks.local else "a node's ranks",
        links=f"{links / 1e9:.3g} GB/s",
    )

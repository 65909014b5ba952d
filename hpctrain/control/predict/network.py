"""The nodes of a prediction as the user states them, and the rates that a collective gets from their network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.common.errors import HpctrainError
from hpctrain.control.predict.compute import CPU
from hpctrain.control.topology.records import LANE_GBIT

if TYPE_CHECKING:
    from hpctrain.control.schedulers.profile import NodeProfile
    from hpctrain.control.topology.fabric import Fabric, Ints
    from hpctrain.control.topology.routes import Phase, Routes

_DEFAULT_RATE = 4 * LANE_GBIT["HDR"] * 1e9 / 8


@dataclass(frozen=True)
class Placed:
    """Hosts of a fabric in the order of a job's rings, with the adapters that take part, (hosts, rails)."""

    routes: Routes
    hosts: tuple[int, ...]
    adapters: Ints


@dataclass(frozen=True, kw_only=True)
class Network:
    """The share of the network that a collective between hosts gets, with one ring or pair of trees a rail.

    Attributes:
        rails: the number of adapters of each host that take part.
        rail_bytes_per_s: one adapter's own rate, in one direction.
        ring_share: what the slowest flow of the rings gets of its adapter's rate; 1.0 without contention.
        tree_share: the same of the two trees: the load of an adapter's own cable against that of the slowest link.
        tree_volume: what the busiest adapter sends or receives in the trees, in buffers of its rail; 2 in large ones.
        warnings: sentences about what is odd or was assumed.
        placed: several hosts of a fabric whose cables are known; None for others.
    """

    hosts: int
    rails: int
    rail_bytes_per_s: float
    ring_share: float = 1.0
    tree_share: float = 1.0
    tree_volume: float = 2.0
    warnings: tuple[str, ...] = ()
    placed: Placed | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What the user states about the nodes; None for what is not stated.

    Attributes:
        gpu: a name of :func:`hpctrain.common.cluster.gpu_models.gpus`, or ``cpu``.
        adapters: network adapters of a node that the ranks use, and ``link_bytes_per_s``: the rate of one, in one
            direction.
    """

    gpu: str | None = None
    gpus_per_node: int | None = None
    adapters: int | None = None
    link_bytes_per_s: float | None = None
    fabric: Path | None = None
    routes: Path | None = None
    rdma: bool = True

    def completed(self, profile: NodeProfile) -> Hardware:
        """The same with what a cluster's profile knows of a node in place of what was not stated."""
        return replace(
            self,
            gpu=self.gpu or profile.gpu,
            gpus_per_node=self.gpus_per_node or profile.gpus or None,
            adapters=self.adapters or profile.adapters or None,
            link_bytes_per_s=self.link_bytes_per_s or (profile.link_gbit * 1e9 / 8 if profile.link_gbit else None),
        )

    @property
    def named_gpu(self) -> str:
        """The GPU, which has to be stated."""
        if self.gpu is not None:
            return self.gpu
        remedy = "--gpu NAME, or --cluster PROFILE of one that names them"
        raise HpctrainError("HT-argument-missing", "which GPUs is the prediction for?", remedy)

    @property
    def local(self) -> int:
        """Ranks of a node, which have to be stated."""
        if self.gpus_per_node is not None:
            return self.gpus_per_node
        remedy = "--gpus-per-node N"
        raise HpctrainError(
            "HT-argument-missing", "how many GPUs has a node, or on cpu, how many ranks share its cores?", remedy
        )

    @property
    def states_links(self) -> bool:
        """Whether adapters and their rate are stated, rather than assumed."""
        return self.fabric is not None or (self.adapters is not None and self.link_bytes_per_s is not None)

    def networks(self, counts: Sequence[int]) -> tuple[list[Network], tuple[str, ...]]:
        """The network of each number of nodes, and what had to be assumed."""
        if self.fabric is None and self.routes is not None:
            raise HpctrainError("HT-option-needs-another", "--routes is of a fabric's file", "add --fabric FILE")
        # One adapter for each GPU, as in nodes that are built for training; one for a node without GPUs.
        adapters = self.adapters or (1 if self.gpu == CPU else self.local)
        rate = self.link_bytes_per_s or _DEFAULT_RATE

        def stated() -> list[Network]:
            return [stated_network(count, adapters=adapters, bytes_per_s=rate) for count in counts]

        if self.fabric is None:
            shared = "that no link is shared (--fabric)"
            return stated(), self._assumed(adapters, rate, shared) if max(counts) > 1 else ()
        from hpctrain.control.topology.build import read_fabric

        fabric = read_fabric(self.fabric, self.routes)
        if has_cables(fabric):
            return networks(fabric, counts, self.adapters, self.link_bytes_per_s), fabric.warnings
        _require_hosts(counts, len(fabric.hosts))
        without = f"that no link is shared, as {self.fabric} has no cables"
        return stated(), (*fabric.warnings, *self._assumed(adapters, rate, without))

    def _assumed(self, adapters: int, rate: float, shared: str) -> tuple[str, ...]:
        parts = []
        if self.adapters is None:
            parts.append(f"{adapters} adapters per node (--adapters-per-node)")
        if self.link_bytes_per_s is None:
            parts.append(f"{rate * 8 / 1e9:g} Gbit/s each (--link)")
        return (f"assumed about the network: {', '.join([*parts, shared])}",)


def stated_network(hosts: int, *, adapters: int, bytes_per_s: float) -> Network:
    """The network of hosts of which only the adapters and their rate are known: nothing between them is shared."""
    return Network(hosts=hosts, rails=adapters, rail_bytes_per_s=bytes_per_s, tree_volume=_tree_volume(hosts))


def network_of(
    routes: Routes,
    hosts_in_order: Sequence[int],
    adapters_per_host: int | None = None,
    bytes_per_s: float | None = None,
) -> Network:
    """The network between hosts of a fabric.

    Args:
        routes: those of one fabric are made once and used for all its networks.
        hosts_in_order: host numbers in the order of the rings, such as ``Placement.order``.
        adapters_per_host: rails used, the first ones; all that the hosts have in common where None.
        bytes_per_s: of one adapter, where the fabric has no speeds; else the fabric's own count.
    """
    from hpctrain.control.topology.routes import double_tree, rail_rings

    fabric = routes.fabric
    adapters = _adapters(fabric, hosts_in_order, adapters_per_host)
    rate = rail_rate(fabric, adapters, bytes_per_s)
    hosts, rails = adapters.shape
    if hosts == 1:
        return Network(hosts=1, rails=rails, rail_bytes_per_s=rate, tree_volume=0.0)
    warnings: tuple[str, ...] = ()
    if not has_cables(fabric):
        warnings = ("the listing has no cables: that no link is shared is an assumption",)
    elif fabric.tables is None:
        warnings = ("no forwarding tables: shortest paths spread by destination are an assumption",)
    return Network(
        hosts=hosts,
        rails=rails,
        rail_bytes_per_s=rate,
        ring_share=share_of(routes, rail_rings(adapters)[0], rate),
        tree_share=share_of(routes, double_tree(adapters)[0], rate),
        tree_volume=_tree_volume(hosts),
        warnings=warnings,
        placed=Placed(routes, tuple(hosts_in_order), adapters) if has_cables(fabric) else None,
    )


def _adapters(fabric: Fabric, hosts: Sequence[int], wanted: int | None) -> Ints:
    """The adapters of hosts that take part, (hosts, rails)."""
    from hpctrain.control.topology.placement import rail_adapters

    adapters = rail_adapters(fabric, hosts)
    if wanted is not None and not 1 <= wanted <= adapters.shape[1]:
        raise HpctrainError(
            "HT-network-bad-number",
            "{adapters} adapters a host, of {count} hosts of the fabric that begin with {host}",
            f"these hosts have 1 to {adapters.shape[1]} on rails in common; leave out hosts that have fewer",
            adapters=wanted,
            count=len(hosts),
            host=fabric.hosts[hosts[0]],
        )
    return adapters[:, :wanted]


def networks(
    fabric: Fabric, counts: Iterable[int], adapters_per_host: int | None = None, bytes_per_s: float | None = None
) -> list[Network]:
    """The networks of the first hosts of the order in which a placement would use them, for several numbers of hosts.

    A part of a depth-first order is depth-first itself, so that hosts are placed once and not for each number. The
    arguments are those of :func:`network_of`.
    """
    from hpctrain.control.topology.placement import report
    from hpctrain.control.topology.routes import Routes

    wanted = list(counts)
    able = usual_hosts(fabric, adapters_per_host)
    others = len(fabric.hosts) - len(able)
    _require_hosts(wanted, len(able), f"; {others} more have other adapters or are not compute nodes" if others else "")
    order = report(fabric, able).placed.order
    routes = Routes(fabric)
    return [network_of(routes, order[:count], adapters_per_host, bytes_per_s) for count in wanted]


def _require_hosts(counts: Sequence[int], hosts: int, apart: str = "") -> None:
    for count in counts:
        if not 1 <= count <= hosts:
            raise HpctrainError(
                "HT-hosts-too-few",
                "{nodes} nodes on a fabric that has {hosts} hosts for them{apart}",
                f"valid: 1 to {hosts}; for more, leave the fabric out and state the adapters and their rate",
                nodes=count,
                hosts=hosts,
                apart=apart,
            )


def usual_hosts(fabric: Fabric, adapters_per_host: int | None = None) -> list[int]:
    """The hosts that a job would run on: with the usual number of adapters, or at least ``adapters_per_host``.

    One host with fewer would cut the rings' rails. Usual is the most frequent number above one, if any. Servers of
    storage and the like are left out.
    """
    from hpctrain.control.topology.names import is_service_host

    owned = Counter(host for host in fabric.host.tolist() if host >= 0 and not is_service_host(fabric.hosts[host]))
    if adapters_per_host is not None:
        return sorted(host for host, count in owned.items() if count >= adapters_per_host)
    frequent = Counter(owned.values())
    several = {count: hosts for count, hosts in frequent.items() if count > 1} or frequent
    most = max(several, key=lambda count: several[count], default=0)
    return sorted(host for host, count in owned.items() if count == most)


def _tree_volume(hosts: int) -> float:
    """Buffers that the busiest of these hosts sends or receives in two trees, of which each carries a half."""
    from hpctrain.control.topology.routes import double_tree

    flows = double_tree(np.arange(hosts, dtype=np.int32)[:, None])
    return float(np.bincount(flows[0].source).max()) / 2 if flows else 0.0


def share_of(routes: Routes, phase: Phase, rate: float) -> float:
    """The rate of the slowest flow of a phase, as a share of ``rate``, that of an adapter alone in one direction."""
    fabric = routes.fabric
    if not has_cables(fabric):
        return 1.0
    load = np.bincount(routes.paths(phase.source, phase.target).link, minlength=len(fabric.source)).astype(np.float64)
    # Flows that the busiest adapter sends or receives.
    most = float(max(np.bincount(phase.source).max(), np.bincount(phase.target).max()))
    capacity = fabric.bandwidth if fabric.has_speeds else rate
    slowest = float((load / capacity).max(initial=0.0))
    return min(1.0, most / rate / slowest) if slowest else 1.0


def has_cables(fabric: Fabric) -> bool:
    """Whether the listing has every cable; Slurm's topology has one line for any number of cables."""
    return fabric.has_speeds or bool(fabric.lid.any())


def rail_rate(fabric: Fabric, adapters: Ints, stated: float | None) -> float:
    """Bytes a second of one adapter in one direction: as stated, else of the fastest of their cables."""
    if stated is not None:
        return stated
    if not fabric.has_speeds:
        raise HpctrainError(
            "HT-fabric-no-speeds",
            "the fabric's listing has no speeds of links",
            "state the rate of an adapter as well, such as --link 200Gb",
        )
    return float(fabric.bandwidth[np.isin(fabric.source, adapters)].max())

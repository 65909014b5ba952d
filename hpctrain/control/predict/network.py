"""The rates that a collective between hosts gets from the links of a fabric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.common.errors import HpctrainError

if TYPE_CHECKING:
    from hpctrain.control.topology.fabric import Fabric, Ints
    from hpctrain.control.topology.routes import Phase, Routes


@dataclass(frozen=True)
class Placed:
    """Hosts of a fabric in the order of a job's rings.

    Attributes:
        adapters: of each host, those that take part, (hosts, rails).
    """

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

    def __post_init__(self) -> None:
        assert self.hosts >= 1 and self.rails >= 1 and self.rail_bytes_per_s > 0
        assert 0 < self.ring_share <= 1 and 0 < self.tree_share <= 1


def stated_network(
    hosts: int,
    *,
    adapters: int,
    bytes_per_s: float,
) -> Network:
    """The network of hosts of which only the adapters are known: nothing between them is shared.

    Args:
        bytes_per_s: the rate of one adapter, in one direction.

    Raises:
        HpctrainError: a number out of its range.
    """
    for name, value in {"hosts": hosts, "adapters": adapters, "bytes_per_s": bytes_per_s}.items():
        if not value > 0 or value == float("inf"):
            raise HpctrainError(
                "HT-network-bad-number",
                "a network with {name}={value}",
                f"{name} must be greater than 0, such as 25e9 bytes/s",
                name=name,
                value=value,
            )
    return Network(hosts=hosts, rails=adapters, rail_bytes_per_s=bytes_per_s, tree_volume=_tree_volume(hosts))


def network_of(
    routes: Routes,
    hosts_in_order: Sequence[int],
    *,
    adapters_per_host: int | None = None,
    bytes_per_s: float | None = None,
) -> Network:
    """The network between hosts of a fabric.

    Args:
        routes: those of one fabric are made once and used for all its networks.
        hosts_in_order: host numbers in the order of the rings, such as ``Placement.order``.
        adapters_per_host: rails used, the first ones; all that the hosts have in common where None.
        bytes_per_s: of one adapter, where the fabric has no speeds; else the fabric's own count.

    Raises:
        HpctrainError: no hosts, fewer adapters than wanted, no speeds, or two hosts that no route joins.
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

    if not hosts:
        raise HpctrainError("HT-hosts-not-named", "a network of no hosts", "name at least one host of the fabric")
    bare = [fabric.hosts[host] for host in hosts if not fabric.adapters(host).size]
    if bare:
        raise HpctrainError(
            "HT-not-in-fabric",
            "{host} has no adapter in the fabric",
            "leave it out, or read a listing that has it",
            host=bare[0],
        )
    adapters = rail_adapters(fabric, hosts)
    if wanted is None:
        return adapters
    if not 1 <= wanted <= adapters.shape[1]:
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
    fabric: Fabric,
    counts: Iterable[int],
    *,
    adapters_per_host: int | None = None,
    bytes_per_s: float | None = None,
) -> list[Network]:
    """The networks of the first hosts of the order in which a placement would use them, for several numbers of hosts.

    A part of a depth-first order is depth-first itself, so that hosts are placed once and not for each number. The
    arguments are those of :func:`network_of`.

    Raises:
        HpctrainError: a number below 1 or above that of the hosts, fewer adapters than wanted, or no speeds.
    """
    from hpctrain.control.topology.placement import report
    from hpctrain.control.topology.routes import Routes

    wanted = list(counts)
    able = usual_hosts(fabric, adapters_per_host)
    for count in wanted:
        if not 1 <= count <= len(able):
            others = len(fabric.hosts) - len(able)
            apart = f"; {others} more have other numbers of adapters or are not compute nodes" if others else ""
            raise HpctrainError(
                "HT-hosts-too-few",
                "{nodes} nodes on a fabric that has {hosts} hosts for them{apart}",
                f"valid: 1 to {len(able)}; for more, leave the fabric out and state the adapters and their rate",
                nodes=count,
                hosts=len(able),
                apart=apart,
            )
    order = report(fabric, able).placed.order
    routes = Routes(fabric)
    return [
        network_of(routes, order[:count], adapters_per_host=adapters_per_host, bytes_per_s=bytes_per_s)
        for count in wanted
    ]


def usual_hosts(fabric: Fabric, adapters_per_host: int | None = None) -> list[int]:
    """The hosts that a job would run on: with the usual number of adapters, or at least ``adapters_per_host``.

    One host with fewer would cut the rings' rails. Usual is the most frequent number above one, if any. Hosts that are
    named as servers of storage and the like are left out.
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
    """The rate of the slowest flow of a phase, as a share of what an adapter alone would allow.

    Args:
        rate: of an adapter, bytes a second in one direction.
    """
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

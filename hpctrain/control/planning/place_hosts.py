"""Chooses the hosts and their order, and the slot of each rank. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.common.cluster.launch_files import network_variables
from hpctrain.common.cluster.node_map import NodeMap, slots
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.mesh_traffic import MeshTraffic, MeshWork
from hpctrain.common.run.plan import HostOrder, Slots

if TYPE_CHECKING:
    from hpctrain.control.topology.fabric import Fabric

# Linux has room for 15 characters; one that begins with a dash is an option that came where the name was left out.
_INTERFACES = re.compile(r"[\w.:][\w.:-]{0,14}(?:,[\w.:][\w.:-]{0,14})*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts in rank order, the benefit of that order, what a mesh sends over them, and the network settings of all
    ranks.
    """

    slots: tuple[Slots, ...]
    order: HostOrder | None = None
    traffic: MeshTraffic | None = None
    environment: dict[str, str] = field(default_factory=dict)


def place_hosts(
    names: Sequence[str],
    ranks: int,
    fabric: Fabric | None,
    *,
    known_from: str,
    slots_of: Mapping[str, int] | None = None,
    node_map: NodeMap | None = None,
    interface: str | None = None,
    work: MeshWork | None = None,
) -> Hosts:
    """Order hosts so that a ring over them, or a mesh, crosses as few leaves as possible, and give each rank its slot.

    Args:
        names: the hosts in the order in which they were named.
        ranks: of all of them together.
        fabric: has all of them; None for a single host.
        known_from: what to say of where the fabric is known from.
        slots_of: how many ranks each host has room for; fewer ranks fill the hosts in their order, and leave out those
            that get none. By default each host gets as many ranks as the others.
        node_map: of each host; None leaves GPUs, adapters and cores to the launcher.
        interface: the network interface for connections that are not InfiniBand, or several with commas between.
        work: the mesh of the ranks with what is trained on it; None where they only replicate.

    Raises:
        HpctrainError: a host that the fabric does not have, no name of an interface, or ranks that the hosts have
            no room for or cannot share evenly.
    """
    require_ranks(ranks)
    if interface is not None and not _INTERFACES.fullmatch(interface):
        raise HpctrainError(
            f"--interface {interface!r} is not the name of a network interface", "for example ib0; `ip link` lists them"
        )
    room = slots_of or _even(names, ranks)
    filled, worth = _filled(names, ranks, room, fabric, known_from)
    traffic = None
    if work:
        filled, worth, traffic = _laid([name for name in names if name in filled], filled, worth, fabric, work)
    environment = network_variables(interface=interface, rails=_on_rails(fabric, tuple(filled)))
    places = {count: slots(node_map, count) if node_map else () for count in set(filled.values())}
    adapters = tuple(device for adapter in node_map.adapters for device in adapter.devices) if node_map else ()
    return Hosts(
        slots=tuple(
            Slots(host=name, slots=count, places=places[count], adapters=adapters) for name, count in filled.items()
        ),
        order=worth,
        traffic=traffic,
        environment=environment,
    )


def _even(names: Sequence[str], ranks: int) -> dict[str, int]:
    if ranks % len(names):
        raise HpctrainError(
            f"-np {ranks}: {len(names)} hosts cannot have the same number of ranks",
            f"for example -np {len(names)}; or say how many each has: --hosts {names[0]}:2,{names[1]}:1",
        )
    return dict.fromkeys(names, ranks // len(names))


def _filled(
    names: Sequence[str], ranks: int, room: Mapping[str, int], fabric: Fabric | None, known_from: str
) -> tuple[dict[str, int], HostOrder | None]:
    """The ranks of each host that gets some, in the order of the ranks, and what that order is worth."""
    while True:
        order, worth = _order(names, fabric, known_from)
        filled = _fill(order, room, ranks)
        if len(filled) == len(names):
            return filled, worth
        # Without the others another order may be the best.
        names = [name for name in names if name in filled]


def _order(names: Sequence[str], fabric: Fabric | None, known_from: str) -> tuple[Sequence[str], HostOrder | None]:
    """The hosts in the order of their ranks, and what it is worth; None for one host."""
    if len(names) == 1:
        return names, None
    assert fabric is not None
    # NumPy comes with them.
    from hpctrain.control.topology.placement import report
    from hpctrain.control.topology.summary import host_numbers

    found = report(fabric, host_numbers(fabric, names))
    # What cannot be bettered stays as the user has it.
    chosen = found.given if found.already_optimal else found.placed
    worth = HostOrder(
        fabric=known_from, crossings_given=found.given.crossings, crossings=chosen.crossings, bound=found.bound
    )
    return [fabric.hosts[host] for host in chosen.order], worth


def _laid(
    given: Sequence[str], filled: dict[str, int], worth: HostOrder | None, fabric: Fabric | None, work: MeshWork
) -> tuple[dict[str, int], HostOrder | None, MeshTraffic]:
    """The ranks of each host in the order in which a mesh is laid over them, and what that is worth."""
    # NumPy comes with them.
    from hpctrain.control.topology.mesh_layout import in_one_node, lay
    from hpctrain.control.topology.summary import host_numbers

    if fabric is None or worth is None:
        return filled, worth, in_one_node(work)
    numbers = dict(zip(given, host_numbers(fabric, given), strict=True))
    slots = {numbers[name]: count for name, count in filled.items()}
    laid = lay(fabric, [*numbers.values()], [*slots], slots, work)
    order = {fabric.hosts[host]: slots[host] for host in laid.order}
    return order, worth.model_copy(update={"crossings": laid.crossings}), laid.traffic


def _fill(order: Sequence[str], room: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The ranks of each host that gets some, one host filled after the other."""
    have = sum(room[name] for name in order)
    if ranks > have:
        raise HpctrainError(
            f"-np {ranks}: the hosts have {have} slots together", "name more hosts, or give them more slots"
        )
    filled: dict[str, int] = {}
    for name in order:
        count = min(room[name], ranks - sum(filled.values()))
        if count:
            filled[name] = count
    return filled


def require_ranks(ranks: int) -> None:
    """Refuse a run without ranks."""
    if ranks < 1:
        raise HpctrainError(f"-np {ranks}: a run needs at least one rank", "for example -np 2")


def _on_rails(fabric: Fabric | None, names: Sequence[str]) -> bool:
    if fabric is None:
        return False
    from hpctrain.control.topology.summary import host_numbers

    return on_rails(fabric, host_numbers(fabric, names))


def on_rails(fabric: Fabric, hosts: Sequence[int]) -> bool:
    """Whether a host is connected to several leaves, so that its adapters are on rails."""
    return any(len(fabric.leaves[host]) > 1 for host in hosts)

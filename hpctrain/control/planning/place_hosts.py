"""Chooses the hosts of a run, their order, and the slot of each rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.common.cluster.launch_files import network_variables
from hpctrain.common.cluster.node_map import NodeMap, slots
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.mesh_traffic import MeshTraffic, MeshWork
from hpctrain.common.recipes.requirements import require_ranks
from hpctrain.common.run.plan import HostOrder, Slots

if TYPE_CHECKING:
    from hpctrain.control.topology.fabric import Fabric


@dataclass(frozen=True, kw_only=True)
class PlacedHosts:
    """Hosts in rank order, the benefit of that order, a mesh's traffic over them, and all ranks' network settings."""

    slots: tuple[Slots, ...]
    order: HostOrder | None = None
    traffic: MeshTraffic | None = None
    environment: dict[str, str] = field(default_factory=dict)


class KnownFabric(NamedTuple):
    """A fabric, and where it is known from."""

    fabric: Fabric
    source: str


def place_hosts(
    named: Mapping[str, int | None],
    ranks: int,
    known: KnownFabric | None,
    *,
    node_map: NodeMap | None = None,
    interface: str | None = None,
    work: MeshWork | None = None,
) -> PlacedHosts:
    """Order hosts so that a ring over them, or a mesh, crosses as few leaves as possible, and give each rank its slot.

    Args:
        named: the hosts in the user's order, all of them with slots or none. Fewer ranks than slots fill the hosts in
            their order, and hosts without ranks are left out; without slots all get the same number of ranks.
        known: its fabric contains all hosts; None for a single host.
        node_map: describes every host; None leaves GPUs, adapters and cores to the launcher.
        interface: the network interface for connections that are not InfiniBand, or several with commas between.
        work: the mesh of the ranks with the model trained on it; None where they only replicate.

    Raises:
        HpctrainError: a host that the fabric does not have, too few slots for the ranks, or ranks that the hosts cannot
            share evenly.
    """
    require_ranks(ranks)
    names, fabric = tuple(named), known and known.fabric
    # Not called slots: Python 3.12.1 would take the function below for it.
    room = {name: given for name, given in named.items() if given is not None} or _even(names, ranks)
    filled, benefit = _fill_in_best_order(names, ranks, room, known)
    traffic = None
    if work:
        used = [name for name in names if name in filled]
        filled, benefit, traffic = _lay_mesh(used, filled, benefit, fabric, work)
    environment = network_variables(interface=interface, rails=_on_rails(fabric, tuple(filled)))
    places = {count: slots(node_map, count) if node_map else () for count in set(filled.values())}
    return PlacedHosts(
        slots=tuple(Slots(host=name, slots=count, places=places[count]) for name, count in filled.items()),
        order=benefit,
        traffic=traffic,
        environment=environment,
    )


def _even(names: Sequence[str], ranks: int) -> dict[str, int]:
    if ranks % len(names):
        raise HpctrainError(
            "HT-ranks-not-divisible",
            "-np {ranks}: {hosts} hosts cannot have the same number of ranks",
            f"for example -np {len(names)}; or say how many each has: --hosts {names[0]}:2,{names[1]}:1",
            ranks=ranks,
            hosts=len(names),
        )
    return dict.fromkeys(names, ranks // len(names))


def _fill_in_best_order(
    names: Sequence[str], ranks: int, room: Mapping[str, int], known: KnownFabric | None
) -> tuple[dict[str, int], HostOrder | None]:
    """The ranks of each host that gets some, in the order of the ranks, and the benefit of that order."""
    while True:
        order, benefit = _order(names, known)
        filled = _fill(order, room, ranks)
        if len(filled) == len(names):
            return filled, benefit
        # The best order of the hosts in use may be another one.
        names = [name for name in names if name in filled]


def _order(names: Sequence[str], known: KnownFabric | None) -> tuple[Sequence[str], HostOrder | None]:
    """The hosts in their best order, and its benefit; None for one host."""
    if len(names) == 1:
        return names, None
    assert known is not None
    fabric = known.fabric
    # Imported here because they load NumPy.
    from hpctrain.control.topology.placement import report
    from hpctrain.control.topology.summary import host_numbers

    found = report(fabric, host_numbers(fabric, names))
    # The user's order stays where no other is better.
    chosen = found.given if found.already_optimal else found.placed
    benefit = HostOrder(
        fabric=known.source, crossings_given=found.given.crossings, crossings=chosen.crossings, bound=found.bound
    )
    return [fabric.hosts[host] for host in chosen.order], benefit


def _lay_mesh(
    given: Sequence[str], filled: dict[str, int], benefit: HostOrder | None, fabric: Fabric | None, work: MeshWork
) -> tuple[dict[str, int], HostOrder | None, MeshTraffic]:
    """The ranks of each host in the best order for a mesh, the benefit of that order, and the mesh's traffic."""
    # Imported here because they load NumPy.
    from hpctrain.control.topology.mesh_layout import in_one_node, lay
    from hpctrain.control.topology.summary import host_numbers

    if fabric is None or benefit is None:
        return filled, benefit, in_one_node(work)
    numbers = dict(zip(given, host_numbers(fabric, given), strict=True))
    slots = {numbers[name]: count for name, count in filled.items()}
    laid = lay(fabric, [*numbers.values()], [*slots], slots, work)
    order = {fabric.hosts[host]: slots[host] for host in laid.order}
    return order, benefit.model_copy(update={"crossings": laid.crossings}), laid.traffic


def _fill(order: Sequence[str], room: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The ranks of each host that gets some, one host filled after the other."""
    have = sum(room[name] for name in order)
    if ranks > have:
        raise HpctrainError(
            "HT-ranks-too-many",
            "-np {ranks}: the hosts have {slots} slots together",
            "name more hosts, or give them more slots",
            ranks=ranks,
            slots=have,
        )
    filled: dict[str, int] = {}
    for name in order:
        count = min(room[name], ranks - sum(filled.values()))
        if count:
            filled[name] = count
    return filled


def _on_rails(fabric: Fabric | None, names: Sequence[str]) -> bool:
    """Whether a host is connected to several leaves, so that its adapters are on rails."""
    if fabric is None:
        return False
    from hpctrain.control.topology.summary import host_numbers

    return any(len(fabric.leaves[host]) > 1 for host in host_numbers(fabric, names))

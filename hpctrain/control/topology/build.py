"""Builds a fabric from the records of files."""

from __future__ import annotations

import graphlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hpctrain.common.errors import HpctrainError, abbreviated, counted
from hpctrain.control.topology.fabric import NO_PORT, Fabric, Floats, Ints, components
from hpctrain.control.topology.fabric_files import read_records
from hpctrain.control.topology.levels import degraded_links, levels
from hpctrain.control.topology.names import (
    UNNAMED_HOSTS,
    host_and_device,
    is_aggregation_node,
    is_service_host,
    managers,
    natural_key,
    switch_name,
)
from hpctrain.control.topology.records import Found, Link, Record, SwitchGroup, bandwidth, cable_ends, sort_records

# Damaged forwarding tables usually cause hundreds of faults.
_FAULTS = 3
# Joins the trees of a file that names nothing above them; Slurm's own names have no spaces.
_ABOVE_ALL = "(above all)"


def build_fabric(records: Iterable[Record]) -> Fabric:
    """The fabric that the records of one or several readers describe.

    Switches come first, then adapters host by host, both in natural order of their names, so that the result does not
    depend on the order in which the fabric was discovered. An adapter with several cabled ports becomes one adapter a
    port. What is odd becomes a warning; SHARP aggregation nodes are left out with one.

    Args:
        records: any order; those of forwarding tables may be among them.

    Raises:
        HpctrainError: no hosts or no cables, or records of a Slurm tree together with those of cables
            or of forwarding tables.
    """
    found = sort_records(records)
    if found.groups and (found.nodes or found.ends or found.forwards):
        raise HpctrainError(
            "HT-fabric-files-do-not-match",
            "{where}: a switch tree of names does not go with cables, nor with forwarding tables, which name ports",
            "give the output of ibnetdiscover alone, or with --routes",
            where=found.where,
        )
    if found.groups:
        return _tree_fabric(found)
    fabric, switches = _cabled(found)
    if not found.forwards:
        return fabric
    fabric = _with_tables(fabric, found, switches)
    # Imported here because routes are built on a finished fabric.
    from hpctrain.control.topology.routes import Routes

    faults = list(itertools.islice(Routes(fabric).faults(), _FAULTS + 1))
    if len(faults) > _FAULTS:
        faults[_FAULTS:] = ["further routes of the forwarding tables do not arrive either"]
    return replace(fabric, warnings=(*fabric.warnings, *faults))


def read_fabric(files: Path | Sequence[Path], routes: Path | None = None) -> Fabric:
    """Read the fabric of a file in any known format, or of one file per subnet.

    Args:
        files: the output of ``ibnetdiscover`` or ``scontrol show topology``, or a ``topology.conf``.
            Hosts of the same name in several files are one host, with an adapter on each subnet.
        routes: a folder of files that ``ibroute`` wrote, or one file of ``dump_lfts``.

    Raises:
        HpctrainError: a file cannot be read, is of no known format or damaged, or describes no hosts.
    """
    return build_fabric(read_records([files] if isinstance(files, Path) else files, routes))


def _tree_fabric(found: Found) -> Fabric:
    """The fabric of the groups: one adapter per host, and a cable of bandwidth 1 for each name below another.

    Blocks, and separate trees, are joined by one more switch: their hosts reach each other by a network that the file
    does not describe.
    """
    groups = {group.name: group for group in _with_hosts(found.groups)}
    hosts = sorted({host for group in groups.values() for host in group.hosts}, key=natural_key)
    warnings = [*found.warnings]
    switches = sorted(groups, key=natural_key)
    below = {child for group in groups.values() for child in group.switches}
    level: dict[str, int] = {}
    for name in graphlib.TopologicalSorter({name: group.switches for name, group in groups.items()}).static_order():
        # A leaf has hosts alone below it.
        level[name] = 1 + max((level[below] for below in groups[name].switches), default=0)
    tops = [name for name in switches if name not in below]
    cables = [(child, group.name) for group in groups.values() for child in group.switches]
    if len(tops) > 1:
        warnings.append(
            f"nothing joins {abbreviated(tops)} in {found.where}: assumed to hang from one switch above them"
        )
        switches.append(_ABOVE_ALL)
        level[_ABOVE_ALL] = 1 + max(level[top] for top in tops)
        cables += [(top, _ABOVE_ALL) for top in tops]
    place = {name: number for number, name in enumerate(switches)}
    host_place = {name: number for number, name in enumerate(hosts, start=len(switches))}
    ends = [(place[child], place[parent]) for child, parent in cables]
    ends += [(host_place[host], place[group.name]) for group in groups.values() for host in group.hosts]
    low, high = np.array(sorted(set(ends)), np.int32).T
    source, target = np.concatenate([low, high]), np.concatenate([high, low])
    nodes = len(switches) + len(hosts)
    # Each node's ports are numbered from 1 in the order of its links.
    counts = [itertools.count(1) for _ in range(nodes)]
    ports = [next(counts[node]) for node in source.tolist()]
    return Fabric(
        names=tuple(name if name not in host_place else f"switch {name}" for name in switches) + tuple(hosts),
        level=np.array([*(level[name] for name in switches), *(0 for _ in hosts)], np.int32),
        subnet=components(nodes, source, target),
        lid=np.zeros(nodes, np.int32),
        host=np.concatenate([np.full(len(switches), -1), np.arange(len(hosts))]).astype(np.int32),
        hosts=tuple(hosts),
        source=source,
        target=target,
        source_port=np.array(ports, np.int32),
        bandwidth=np.ones(len(source)),
        warnings=tuple(warnings),
    )


def _with_hosts(groups: Sequence[SwitchGroup]) -> Sequence[SwitchGroup]:
    """The groups that have hosts or switches below them."""
    left = list(groups)
    while empty := {group.name for group in left if not (group.hosts or group.switches)}:
        left = [
            replace(group, switches=tuple(switch for switch in group.switches if switch not in empty))
            for group in left
            if group.name not in empty
        ]
    return left


@dataclass(frozen=True, slots=True)
class _Adapter:
    """An adapter's port that has a cable."""

    guid: str
    port: int
    host: str
    name: str
    lid: int


def _cabled(found: Found) -> tuple[Fabric, dict[str, int]]:
    """The fabric, and the number of each switch by its GUID."""
    engines = _leave_engines_out(found)
    ends, cable_warnings = cable_ends(found)
    warnings = [*found.warnings, *cable_warnings]
    switches = sorted(
        (node for node in found.nodes.values() if node.kind == "switch"),
        key=lambda node: (natural_key(node.name), node.guid),
    )
    adapters = _adapters(found, ends, warnings)
    hosts = list(dict.fromkeys(adapter.host for adapter in adapters))
    if not hosts:
        raise _no_hosts(found)
    warnings += engines
    if managing := managers(hosts):
        what = "hosts that by their names manage the fabric, which are not counted and not chosen for a run"
        warnings.append(counted(what, sorted(managing)))
    number = {name: place for place, name in enumerate(hosts)}
    places: dict[tuple[str, int | None], int] = {(node.guid, None): place for place, node in enumerate(switches)}
    places |= {(adapter.guid, adapter.port): place for place, adapter in enumerate(adapters, start=len(switches))}
    source, target, port, rate = _links(ends, places, warnings)

    is_switch = np.arange(len(places)) < len(switches)
    host = np.full(len(places), -1, np.int32)
    host[len(switches) :] = [number[adapter.host] for adapter in adapters]
    service = np.array([is_service_host(name) for name in hosts])
    level = levels(is_switch, host >= 0, (host >= 0) & service[host], source, target)
    names = _unique(
        [switch_name(node.name) for node in switches] + [adapter.name for adapter in adapters],
        [node.guid for node in switches] + [adapter.guid for adapter in adapters],
        warnings,
    )
    idle = [name for name, height in zip(names[: len(switches)], level.tolist(), strict=False) if height < 0]
    if idle:
        warnings.append(
            counted("switches without hosts that are on no shortest path between two leaves, not used", idle)
        )
    slow = [
        f"{names[source[link]]} to {names[target[link]]} ({rate[link] / usual:.0%})"
        for link, usual in degraded_links(level, source, target, rate)
    ]
    if slow:
        warnings.append(counted("links slower than their peers", slow))
    fabric = Fabric(
        names=names,
        level=level,
        subnet=components(len(places), source, target),
        lid=np.array([*(node.lid or 0 for node in switches), *(adapter.lid for adapter in adapters)], np.int32),
        host=host,
        hosts=tuple(hosts),
        source=source,
        target=target,
        source_port=port,
        bandwidth=rate,
        warnings=tuple(warnings),
    )
    return fabric, {node.guid: place for place, node in enumerate(switches)}


def _leave_engines_out(found: Found) -> list[str]:
    """Remove SHARP aggregation nodes and their cables from what was found; a warning if there are some."""
    engines = {guid for guid, node in found.nodes.items() if is_aggregation_node(node)}
    found.nodes = {guid: node for guid, node in found.nodes.items() if guid not in engines}
    found.ends = {key: end for key, end in found.ends.items() if engines.isdisjoint((end.guid, end.peer))}
    return [f"{len(engines)} SHARP aggregation nodes left out: they are parts of switches"] if engines else []


def _with_tables(fabric: Fabric, found: Found, switches: Mapping[str, int]) -> Fabric:
    """The fabric with its tables; a switch is known by its GUID, or by its LID where the table does not give one."""
    by_lid = {int(fabric.lid[node]): node for node in switches.values()}
    row: dict[int, int] = {}
    strangers: dict[str, None] = {}
    rows, lids, ports = [], [], []
    for entry in found.forwards:
        node = switches.get(entry.switch) if entry.switch else by_lid.get(entry.switch_lid or 0)
        if node is None:
            strangers[entry.switch or f"LID {entry.switch_lid}"] = None
            continue
        rows.append(row.setdefault(node, len(row)))
        lids.append(entry.lid)
        ports.append(entry.port)
    if not rows:
        raise HpctrainError(
            "HT-fabric-files-do-not-match",
            "{where}: the forwarding tables belong to switches that {fabric} does not have: {switches}",
            "write both files on the same fabric, at the same time",
            where=found.forwards[0].where,
            fabric=found.where,
            switches=abbreviated(list(strangers)),
        )
    tables = np.full((len(row), max(*lids, int(fabric.lid.max())) + 1), NO_PORT, np.int16)
    tables[rows, lids] = ports
    warnings = list(fabric.warnings)
    replaced = set(np.array(rows)[tables[rows, lids] != ports].tolist())
    if differing := [fabric.names[node] for node, place in row.items() if place in replaced]:
        warnings.append(counted("switches with several forwarding tables, the last of which counts", differing))
    if strangers:
        warnings.append(counted("forwarding tables of unknown switches, left out", list(strangers)))
    if without := [fabric.names[node] for node in switches.values() if node not in row and fabric.level[node] > 0]:
        raise HpctrainError(
            "HT-fabric-files-do-not-match",
            "{where}: no forwarding table of {switches}",
            "dump_lfts writes those of all switches; without --routes, shortest paths are assumed",
            where=found.forwards[0].where.rpartition(":")[0],
            switches=abbreviated(without),
        )
    return replace(fabric, tables=tables, table_switches=np.array(list(row), np.int32), warnings=tuple(warnings))


def _no_hosts(found: Found) -> HpctrainError:
    names = [node.name or node.guid for node in found.nodes.values() if node.kind == "adapter"]
    kind = f"adapters without a cable to anything: {abbreviated(names)}" if names else "no channel adapter"
    return HpctrainError(
        "HT-fabric-no-hosts",
        "{where}: no host on a fabric, only {found}",
        "discover again as root from a host whose port is Active (ibstat shows it; -C and -P choose the port)",
        where=found.where,
        found=kind,
    )


def _adapters(found: Found, ends: Sequence[Link], warnings: list[str]) -> list[_Adapter]:
    """Every adapter port with a cable, host by host in natural order."""
    cabled: dict[str, dict[int, Link]] = {}
    for end in ends:
        if found.nodes[end.guid].kind == "adapter":
            cabled.setdefault(end.guid, {})[end.port] = end
    adapters: list[_Adapter] = []
    nameless, loose = [], []
    for node in found.nodes.values():
        if node.kind != "adapter":
            continue
        host, _ = host_and_device(node.name)
        ports = cabled.get(node.guid, {})
        if not ports:
            loose.append(node.name or node.guid)
        elif host is None:
            nameless.append(node.guid)
        name = node.name.strip() if host else node.guid
        adapters += [
            _Adapter(
                guid=node.guid,
                port=end.port,
                host=host or node.guid,
                name=f"{name}/{end.port}" if len(ports) > 1 else name,
                lid=end.lid or 0,
            )
            for end in ports.values()
        ]
    counts: dict[str, list[str]] = {
        "adapters without a host name, each taken for a host of its own under its GUID": nameless,
        "adapters without a cable, left out": loose,
        "hosts with an installer's default name, each perhaps several machines": sorted(
            {adapter.host for adapter in adapters if adapter.host in UNNAMED_HOSTS}
        ),
    }
    warnings += [counted(what, names) for what, names in counts.items() if names]
    hosts = {host: natural_key(host) for host in {adapter.host for adapter in adapters}}
    return sorted(
        adapters, key=lambda adapter: (hosts[adapter.host], natural_key(adapter.name), adapter.guid, adapter.port)
    )


def _links(
    ends: Sequence[Link], places: dict[tuple[str, int | None], int], warnings: list[str]
) -> tuple[Ints, Ints, Ints, Floats]:
    """Source, target, port and bandwidth of each directed link."""
    switches = {guid: at for (guid, port), at in places.items() if port is None}
    lanes = [(end.width, end.speed) for end in ends]
    rates = {key: bandwidth(*key) for key in set(lanes)}
    rate = np.array([rates[key] for key in lanes], np.float64)
    if (unknown := np.isnan(rate)).any():
        warnings.append(f"{unknown.sum() // 2} links of unknown speed, taken to be as fast as the median of the others")
        rate[unknown] = 1.0 if unknown.all() else np.median(rate[~unknown])
    return (
        np.array([switches[e.guid] if e.guid in switches else places[e.guid, e.port] for e in ends], np.int32),
        np.array(
            [switches[e.peer] if e.peer in switches else places[e.peer or "", e.peer_port] for e in ends], np.int32
        ),
        np.array([end.port for end in ends], np.int32),
        rate,
    )


def _unique(names: Sequence[str], guids: Sequence[str], warnings: list[str]) -> tuple[str, ...]:
    """The names, with the GUID appended to those that several nodes share."""
    count = Counter(names)
    twice = [name for name in count if count[name] > 1 and name]
    if twice:
        warnings.append(counted("names that several nodes have, told apart by their GUIDs", twice))
    return tuple(
        name if name and count[name] == 1 else f"{name} {guid}".strip() for name, guid in zip(names, guids, strict=True)
    )

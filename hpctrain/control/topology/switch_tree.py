"""Makes a fabric from a tree of switch and host names, such as Slurm's."""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hpctrain.common.errors import abbreviated
from hpctrain.control.topology.cabling import Found
from hpctrain.control.topology.fabric import Fabric, components
from hpctrain.control.topology.names import natural_key
from hpctrain.control.topology.records import SwitchGroup

# Joins the trees of a file that names nothing above them; Slurm's own names have no spaces.
ABOVE_ALL = "(above all)"


def tree_fabric(found: Found) -> Fabric:
    """The fabric of the groups: one adapter per host, and a cable of bandwidth 1 for each name below another.

    Blocks, and separate trees, are joined by one more switch: their hosts reach each other by a network that the file
    does not describe.
    """
    groups = {group.name: group for group in _with_hosts(found.groups)}
    hosts = sorted({host for group in groups.values() for host in group.hosts}, key=natural_key)
    warnings = [*found.warnings]
    switches = sorted(groups, key=natural_key)
    below = {child for group in groups.values() for child in group.switches}
    level = _levels(groups)
    tops = [name for name in switches if name not in below]
    cables = [(child, group.name) for group in groups.values() for child in group.switches]
    if len(tops) > 1:
        warnings.append(
            f"nothing joins {abbreviated(tops)} in {found.where}: assumed to hang from one switch above them"
        )
        switches.append(ABOVE_ALL)
        level[ABOVE_ALL] = 1 + max(level[top] for top in tops)
        cables += [(top, ABOVE_ALL) for top in tops]
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


def _levels(groups: Mapping[str, SwitchGroup]) -> dict[str, int]:
    """The level of each switch: 1 if only hosts are below it, else one more than the highest switch below it."""
    level: dict[str, int] = {}
    for name in graphlib.TopologicalSorter({name: group.switches for name, group in groups.items()}).static_order():
        level[name] = 1 + max((level[below] for below in groups[name].switches), default=0)
    return level


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

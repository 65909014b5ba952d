"""A summary of a fabric: counts, hosts, and the tree of its switches."""

from __future__ import annotations

import difflib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.common.cluster.host_list import fold_hosts
from hpctrain.common.errors import HpctrainError
from hpctrain.control.topology.fabric import Fabric
from hpctrain.control.topology.levels import oversubscription
from hpctrain.control.topology.names import managers, natural_key
from hpctrain.control.topology.subtrees import Subtree, subtrees

_SHOWN_UNKNOWN = 5
_SHOWN_CHARACTERS = 500


@dataclass(frozen=True, kw_only=True)
class Branch:
    """Switches that serve the same hosts, with everything below them.

    Attributes:
        switches: their names in natural order; none for hosts that are cabled to each other.
        down, up, across: the cables downwards, upwards, and between these switches. Where only cables between equals
            join the branches, the switches are these equals, and all cables are across.
        hosts: the hosts on exactly these switches, without those of branches below.
    """

    switches: tuple[str, ...]
    down: int
    up: int
    across: int
    hosts: tuple[str, ...]
    branches: tuple[Branch, ...]


def counts(fabric: Fabric) -> dict[str, int]:
    """The number of hosts that can run jobs, and of adapters, switches and links; a link is a cable. Leaves and spines
    are the switches in use.
    """
    leaves, switches = int((fabric.level == 1).sum()), int((fabric.level >= 1).sum())
    return {
        "hosts": len(fabric.hosts) - len(managers(fabric.hosts)),
        "adapters": int((fabric.level == 0).sum()),
        "switches": switches + fabric.idle_switches,
        "leaves": leaves,
        "spines": switches - leaves,
        "links": len(fabric.source) // 2,
        "subnets": len(subnets(fabric)),
    }


def subnets(fabric: Fabric) -> tuple[dict[str, int], ...]:
    """The hosts, adapters and switches of each part without a cable to another; the largest first."""
    parts = []
    for subnet in np.unique(fabric.subnet[fabric.host >= 0]).tolist():
        inside = fabric.subnet == subnet
        hosts = len(np.unique(fabric.host[inside & (fabric.host >= 0)]))
        adapters, switches = (int((inside & part).sum()) for part in (fabric.level == 0, fabric.level >= 1))
        parts.append({"hosts": hosts, "adapters": adapters, "switches": switches})
    return tuple(sorted(parts, key=lambda part: -part["adapters"]))


def leaf_oversubscription(fabric: Fabric) -> dict[str, float | None]:
    """For each leaf: its bandwidth to adapters over that to other switches; None without other switches.

    Empty where the fabric has no speeds.
    """
    if not fabric.has_speeds:
        return {}
    return {
        fabric.names[leaf]: ratio if math.isfinite(ratio) else None for leaf, ratio in oversubscription(fabric).items()
    }


def host_numbers(fabric: Fabric, names: Iterable[str]) -> list[int]:
    """The numbers of hosts. A host that the fabric does not have is an error, with the nearest name."""
    numbers = {name: number for number, name in enumerate(fabric.hosts)}
    wanted = list(names)
    unknown = [name for name in wanted if name not in numbers]
    if unknown:
        shown = ", ".join(_with_nearest(name, numbers) for name in unknown[:_SHOWN_UNKNOWN])
        more = f" and {len(unknown) - _SHOWN_UNKNOWN} more" if len(unknown) > _SHOWN_UNKNOWN else ""
        raise HpctrainError(
            "HT-not-in-fabric",
            "the fabric has no host {shown}{more}",
            f"it has {len(numbers)} hosts: {_folded(fabric.hosts)}",
            shown=shown,
            more=more,
            hosts=unknown,
        )
    return [numbers[name] for name in wanted]


def connected_hosts(fabric: Fabric) -> list[list[int]]:
    """Hosts that can run jobs, in natural order of their names, grouped by the subnets of their adapters."""
    idle = managers(fabric.hosts)
    subnets: dict[int, set[int]] = defaultdict(set)
    taking_part = fabric.host >= 0
    for host, subnet in zip(fabric.host[taking_part].tolist(), fabric.subnet[taking_part].tolist(), strict=True):
        subnets[host].add(subnet)
    groups: dict[frozenset[int], list[int]] = defaultdict(list)
    able = (host for host in subnets if fabric.hosts[host] not in idle)
    for host in sorted(able, key=lambda host: natural_key(fabric.hosts[host])):
        groups[frozenset(subnets[host])].append(host)
    return list(groups.values())


def _with_nearest(name: str, known: Iterable[str]) -> str:
    folded = {each.casefold(): each for each in known}
    [close] = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0)
    return f"{name!r} (did you mean {folded[close]!r}?)"


def _folded(hosts: Sequence[str]) -> str:
    # A node's name may be any text, also one that looks like a broken list of hosts.
    plain = [host for host in hosts if re.fullmatch(r"[\w.-]+", host)]
    text = ",".join(filter(None, [fold_hosts(plain), *sorted(set(hosts) - set(plain))]))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def branches(fabric: Fabric) -> tuple[Branch, ...]:
    """The fabric as a tree, from the top: hosts by the set of their leaves, these sets by the switches above them."""
    return _sorted(each for tree in subtrees(fabric) for each in _branches(fabric, tree))


def _branches(fabric: Fabric, tree: Subtree) -> Iterator[Branch]:
    """The branch of a subtree; the branches below it if only leaves that their hosts share join them."""
    below = [each for subtree in tree.below for each in _branches(fabric, subtree)]
    hosts = _natural(fabric.hosts[host] for host in tree.hosts)
    switches = list(tree.switches)
    if tree.switches:
        names = {fabric.names[switch] for switch in switches}
        # Some hosts may be on these switches although there are branches below them.
        hosts += tuple(host for each in below if set(each.switches) == names for host in each.hosts)
        below = [each for each in below if set(each.switches) != names]
        down, up, across = _cables(fabric, switches)
    elif tree.hosts:
        down, up, across = 0, 0, _own_cables(fabric, tree.hosts)
    else:
        switches = _joined_equals(fabric, tree)
        down, up, across = 0, 0, _cables(fabric, switches)[2]
    if across or switches:
        yield Branch(
            switches=_natural(fabric.names[switch] for switch in switches),
            down=down,
            up=up,
            across=across,
            hosts=hosts,
            branches=_sorted(below),
        )
    else:
        yield from below


def _natural(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=natural_key))


def _sorted(unsorted: Iterable[Branch]) -> tuple[Branch, ...]:
    return tuple(sorted(unsorted, key=lambda branch: [natural_key(name) for name in branch.switches or branch.hosts]))


def _joined_equals(fabric: Fabric, tree: Subtree) -> list[int]:
    """The switches of a subtree's level that have cables to each other."""
    of_level = [switch for each in tree.walk() for switch in each.switches if fabric.level[switch] == tree.level]
    among = np.isin(fabric.source, of_level) & np.isin(fabric.target, of_level)
    joined: list[int] = np.unique(fabric.source[among]).tolist()
    return joined


def _cables(fabric: Fabric, switches: Sequence[int]) -> tuple[int, int, int]:
    """Cables of these switches down, up, and between themselves."""
    from_here = np.isin(fabric.source, switches)
    target = fabric.target[from_here]
    rise = fabric.level[target] - fabric.level[fabric.source[from_here]]
    part = fabric.level[target] >= 0
    across = np.isin(target, switches) & (rise == 0)
    return int((part & (rise < 0)).sum()), int((rise > 0).sum()), int(across.sum()) // 2


def _own_cables(fabric: Fabric, hosts: Sequence[int]) -> int:
    """Cables between adapters of these hosts."""
    between = np.isin(fabric.host[fabric.source], hosts) & np.isin(fabric.host[fabric.target], hosts)
    return int(between.sum()) // 2

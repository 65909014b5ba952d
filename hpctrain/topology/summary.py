"""A fabric in words: how much of each kind, which hosts, and the tree that its switches make."""

from __future__ import annotations

import difflib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.cluster.host_list import fold_hosts
from hpctrain.errors import HpctrainError
from hpctrain.topology.fabric import Fabric
from hpctrain.topology.levels import oversubscription
from hpctrain.topology.names import natural

_SHOWN_UNKNOWN = 5
_SHOWN_CHARACTERS = 500

Switches = frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Branch:
    """Switches that serve the same hosts, and what hangs on them.

    Attributes:
        switches: their names, in natural order.
        down, up: cables to what is below and above them.
        hosts: that hang on exactly these switches; those of a branch below are not among them.
    """

    switches: tuple[str, ...]
    down: int
    up: int
    hosts: tuple[str, ...]
    branches: tuple[Branch, ...]


def counts(fabric: Fabric) -> dict[str, int]:
    """How much of each kind takes part; a link is a cable."""
    leaves, switches = int((fabric.level == 1).sum()), int((fabric.level >= 1).sum())
    return {
        "hosts": len(fabric.hosts),
        "adapters": int((fabric.level == 0).sum()),
        "switches": switches,
        "leaves": leaves,
        "spines": switches - leaves,
        "links": len(fabric.source) // 2,
    }


def leaf_oversubscription(fabric: Fabric) -> dict[str, float | None]:
    """Of each leaf: the bandwidth down to its adapters over that to other switches; None where there is none.

    Empty where the fabric has no speeds.
    """
    if not fabric.has_speeds:
        return {}
    return {
        fabric.names[leaf]: ratio if math.isfinite(ratio) else None for leaf, ratio in oversubscription(fabric).items()
    }


def host_numbers(fabric: Fabric, names: Iterable[str]) -> list[int]:
    """The numbers of hosts.

    Raises:
        HpctrainError: the fabric does not have one; names the nearest that it has.
    """
    numbers = {name: number for number, name in enumerate(fabric.hosts)}
    wanted = list(names)
    unknown = [name for name in wanted if name not in numbers]
    if unknown:
        shown = ", ".join(_with_nearest(name, numbers) for name in unknown[:_SHOWN_UNKNOWN])
        more = f" and {len(unknown) - _SHOWN_UNKNOWN} more" if len(unknown) > _SHOWN_UNKNOWN else ""
        raise HpctrainError(
            f"the fabric has no host {shown}{more}",
            f"it has {len(numbers)} hosts: {_folded(fabric.hosts)}",
        )
    return [numbers[name] for name in wanted]


def connected_hosts(fabric: Fabric) -> list[list[int]]:
    """Hosts in natural order of their names, apart where their adapters are in different subnets."""
    subnets: dict[int, set[int]] = defaultdict(set)
    taking_part = fabric.host >= 0
    for host, subnet in zip(fabric.host[taking_part].tolist(), fabric.subnet[taking_part].tolist(), strict=True):
        subnets[host].add(subnet)
    groups: dict[frozenset[int], list[int]] = defaultdict(list)
    for host in sorted(subnets, key=lambda host: natural(fabric.hosts[host])):
        groups[frozenset(subnets[host])].append(host)
    return list(groups.values())


def _with_nearest(name: str, known: Iterable[str]) -> str:
    folded = {each.casefold(): each for each in known}
    [close] = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0)
    return f"{name!r} (did you mean {folded[close]!r}?)"


def _folded(hosts: Sequence[str]) -> str:
    # A node may call itself anything, also what is a list of hosts gone wrong.
    plain = [host for host in hosts if re.fullmatch(r"[\w.-]+", host)]
    text = ",".join(filter(None, [fold_hosts(plain), *sorted(set(hosts) - set(plain))]))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def branches(fabric: Fabric) -> tuple[Branch, ...]:
    """The fabric as a tree, from the top: hosts by the set of their leaves, these sets by the switches above them."""
    above = _above(fabric)
    hosts: dict[Switches, list[int]] = defaultdict(list)
    for host, leaves in enumerate(fabric.leaves):
        hosts[leaves].append(host)
    below: dict[Switches, dict[Switches, None]] = defaultdict(dict)
    roots: dict[Switches, None] = {}
    front = dict.fromkeys(hosts)
    while front:
        higher = {switches: frozenset[int]().union(*(above[switch] for switch in switches)) for switches in front}
        roots |= {switches: None for switches, up in higher.items() if not up}
        parents = _joined(up for up in higher.values() if up)
        for switches, up in higher.items():
            if up:
                below[next(parent for parent in parents if up <= parent)][switches] = None
        front = dict.fromkeys(parents)

    def branch(switches: Switches) -> Branch:
        down, up = _cables(fabric, switches)
        return Branch(
            switches=tuple(sorted((fabric.names[switch] for switch in switches), key=natural)),
            down=down,
            up=up,
            hosts=tuple(sorted((fabric.hosts[host] for host in hosts.get(switches, ())), key=natural)),
            branches=tuple(sorted(map(branch, below.get(switches, ())), key=_by_name)),
        )

    return tuple(sorted(map(branch, roots), key=_by_name))


def _joined(sets: Iterable[Switches]) -> list[Switches]:
    """Unions of the sets that overlap: a missing cable makes no other tree."""
    joined: list[Switches] = []
    for each in sets:
        overlapping = [other for other in joined if other & each]
        joined = [*(other for other in joined if not other & each), each.union(*overlapping)]
    return joined


def _by_name(branch: Branch) -> list[list[str | int]]:
    return [natural(name) for name in branch.switches]


def _above(fabric: Fabric) -> dict[int, set[int]]:
    """Of each switch, those one level up or higher that it is cabled to."""
    above: dict[int, set[int]] = defaultdict(set)
    upwards = (fabric.level[fabric.source] > 0) & (fabric.level[fabric.target] > fabric.level[fabric.source])
    for source, target in zip(fabric.source[upwards].tolist(), fabric.target[upwards].tolist(), strict=True):
        above[source].add(target)
    return above


def _cables(fabric: Fabric, switches: Switches) -> tuple[int, int]:
    from_here = np.isin(fabric.source, list(switches))
    rise = fabric.level[fabric.target[from_here]] - fabric.level[fabric.source[from_here]]
    part = fabric.level[fabric.target[from_here]] >= 0
    return int((part & (rise < 0)).sum()), int((rise > 0).sum())

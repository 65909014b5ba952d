"""A summary of a fabric: counts, hosts, and the tree of its switches."""

from __future__ import annotations

import difflib
import math
import textwrap
from collections.abc import Iterable, Iterator
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
        down, up, across: the cables downwards, upwards, and to switches of the same level.
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
        close = difflib.get_close_matches(unknown[0], numbers, n=1, cutoff=0)
        known = textwrap.shorten(fold_hosts(fabric.hosts).replace(",", ", "), _SHOWN_CHARACTERS, placeholder=" …")
        shown = ", ".join(map(repr, unknown[:_SHOWN_UNKNOWN]))
        more = f" and {len(unknown) - _SHOWN_UNKNOWN} more" if len(unknown) > _SHOWN_UNKNOWN else ""
        raise HpctrainError(
            "HT-not-in-fabric",
            "the fabric has no host {shown}{more}",
            f"did you mean {close[0]!r}? it has {len(numbers)} hosts: {known}",
            shown=shown,
            more=more,
            hosts=unknown,
        )
    return [numbers[name] for name in wanted]


def branches(fabric: Fabric) -> tuple[Branch, ...]:
    """The fabric as a tree, from the top: hosts by the set of their leaves, these sets by the switches above them."""
    return _sorted(branch for tree in subtrees(fabric) for branch in _branches(fabric, tree))


def _branches(fabric: Fabric, tree: Subtree) -> Iterator[Branch]:
    """The branch of a subtree; the branches below it if no switches above join them."""
    below = [branch for subtree in tree.below for branch in _branches(fabric, subtree)]
    if not tree.switches and not tree.hosts:
        yield from below
        return
    from_here = np.isin(fabric.source, tree.switches)
    rise = fabric.level[fabric.target[from_here]] - fabric.level[fabric.source[from_here]]
    # A cable is seen from both of its ends, unless the other one is of another branch.
    inside = (rise == 0) & np.isin(fabric.target[from_here], tree.switches)
    yield Branch(
        switches=_natural(fabric.names[switch] for switch in tree.switches),
        down=int(((rise < 0) & (fabric.level[fabric.target[from_here]] >= 0)).sum()),
        up=int((rise > 0).sum()),
        across=int((rise == 0).sum()) - int(inside.sum()) // 2,
        hosts=_natural(fabric.hosts[host] for host in tree.hosts),
        branches=_sorted(below),
    )


def _natural(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=natural_key))


def _sorted(unsorted: Iterable[Branch]) -> tuple[Branch, ...]:
    return tuple(sorted(unsorted, key=lambda branch: [natural_key(name) for name in branch.switches or branch.hosts]))

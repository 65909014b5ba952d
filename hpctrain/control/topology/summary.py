"""A summary of a fabric: counts, oversubscription and hosts."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable

import numpy as np

from hpctrain.common.cluster.host_list import fold_hosts
from hpctrain.common.errors import HpctrainError, abbreviated
from hpctrain.control.topology.fabric import Fabric
from hpctrain.control.topology.names import managers

_SHOWN_CHARACTERS = 500


def counts(fabric: Fabric) -> dict[str, int]:
    """The number of hosts that can run jobs, and of adapters, switches and links; a link is a cable. Leaves and spines
    are the switches in use.
    """
    leaves, used = int((fabric.level == 1).sum()), int((fabric.level >= 1).sum())
    return {
        "hosts": len(fabric.hosts) - len(managers(fabric.hosts)),
        "adapters": int((fabric.level == 0).sum()),
        "switches": int((fabric.host < 0).sum()),
        "leaves": leaves,
        "spines": used - leaves,
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
    """For each leaf: its bandwidth to adapters over that to other switches, where 1 and below is non-blocking; None
    without other switches. Empty where the fabric has no speeds.
    """
    if not fabric.has_speeds:
        return {}
    below = fabric.level[fabric.target]
    down, up = (
        np.bincount(fabric.source[links], fabric.bandwidth[links], len(fabric.names))
        for links in (below == 0, below > 0)
    )
    leaves = np.flatnonzero(fabric.level == 1).tolist()
    return {fabric.names[leaf]: float(down[leaf] / up[leaf]) if up[leaf] else None for leaf in leaves}


def host_numbers(fabric: Fabric, names: Iterable[str]) -> list[int]:
    """The numbers of hosts. A host that the fabric does not have is an error, with the nearest name."""
    numbers = {name: number for number, name in enumerate(fabric.hosts)}
    wanted = list(names)
    unknown = [name for name in wanted if name not in numbers]
    if unknown:
        close = difflib.get_close_matches(unknown[0], numbers, n=1, cutoff=0)
        known = textwrap.shorten(fold_hosts(fabric.hosts).replace(",", ", "), _SHOWN_CHARACTERS, placeholder=" …")
        raise HpctrainError(
            "HT-not-in-fabric",
            "the fabric has no host {shown}",
            f"did you mean {close[0]!r}? it has {len(numbers)} hosts: {known}",
            shown=abbreviated([*map(repr, unknown)], 5),
            hosts=unknown,
        )
    return [numbers[name] for name in wanted]

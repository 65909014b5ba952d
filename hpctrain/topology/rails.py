"""The rail of each adapter: by what it hangs on, since the positions of others shift where a host lost one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from hpctrain.topology.fabric import Fabric, Ints


def rail_adapters(fabric: Fabric, hosts: Sequence[int]) -> Ints:
    """Of each host the adapter on each rail that all hosts have, (hosts, rails).

    A host's adapters are matched by their switches to those of the fullest host on the same switches, whose adapters
    are numbered by the rails: by their subnets, as far as planes tell them apart, else in the order of their names.
    Where the hosts have no rail in common, adapters are taken in the order of their names.
    """
    by_host = np.argsort(fabric.host, kind="stable")
    bounds = np.searchsorted(fabric.host[by_host], np.arange(len(fabric.hosts) + 1))
    adapters = [by_host[begin:end].tolist() for begin, end in pairwise(bounds)]
    cables = fabric.level[fabric.source] == 0
    switch = dict(zip(fabric.source[cables].tolist(), fabric.target[cables].tolist(), strict=True))
    on = [[switch.get(adapter, -1) for adapter in of_host] for of_host in adapters]
    # The fullest host first, so that a search for a pattern ends with it.
    fullest = sorted(range(len(adapters)), key=lambda host: -len(adapters[host]))
    patterns: dict[int, dict[tuple[int, ...], list[int]]] = defaultdict(dict)
    whole = fabric.subnet[adapters[fullest[0]]].tolist()
    for host in fullest:
        for each in set(on[host]):
            patterns[each].setdefault(tuple(on[host]), _match(fabric.subnet[adapters[host]].tolist(), whole))

    def on_rails(host: int) -> dict[int, int]:
        """The adapter on each rail."""
        pattern, rails = next(
            (pattern, rails)
            for pattern, rails in patterns[on[host][0]].items()
            if Counter(on[host]) <= Counter(pattern)
        )
        return {rails[place]: adapter for place, adapter in zip(_match(on[host], pattern), adapters[host], strict=True)}

    found = [on_rails(host) for host in hosts]
    common = sorted(set.intersection(*(set(rails) for rails in found)))
    if common:
        return np.array([[rails[rail] for rail in common] for rails in found], np.int32)
    fewest = min(len(adapters[host]) for host in hosts)
    return np.array([adapters[host][:fewest] for host in hosts], np.int32)


def _match(keys: Sequence[int], pattern: Sequence[int]) -> list[int]:
    """The place in the pattern of each key, places of equal keys in turn; 0, 1, … where the pattern lacks one."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, key in enumerate(pattern):
        places[key].append(place)
    if Counter(keys) <= Counter(pattern):
        return [places[key].pop(0) for key in keys]
    return list(range(len(keys)))

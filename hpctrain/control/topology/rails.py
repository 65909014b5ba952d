"""Assigns a rail to each adapter by its switch, since its position among a host's adapters shifts if one is lost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from hpctrain.control.topology.fabric import Fabric, Ints


def rail_adapters(fabric: Fabric, hosts: Sequence[int]) -> Ints:
    """For each host the adapter on each rail that all hosts have, (hosts, rails).

    A host's adapters are matched by their switches to those of the host with most adapters on the same switches, whose
    adapters are numbered by rail: by their subnets where the rails are separate planes, else in the order of their
    names. Where the hosts have no common rail, adapters are taken in the order of their names.
    """
    by_host = np.argsort(fabric.host, kind="stable")
    bounds = np.searchsorted(fabric.host[by_host], np.arange(len(fabric.hosts) + 1))
    cables = fabric.level[fabric.source] == 0
    switch = np.full(len(fabric.names), -1, np.int32)
    switch[fabric.source[cables]] = fabric.target[cables]

    def adapters(host: int) -> list[int]:
        numbers: list[int] = by_host[bounds[host] : bounds[host + 1]].tolist()
        return numbers

    def on(host: int) -> tuple[int, ...]:
        return tuple(switch[adapters(host)].tolist())

    whole = fabric.subnet[adapters(int(np.diff(bounds).argmax()))].tolist()
    first = {on(host)[0] for host in hosts}
    beside = np.unique(fabric.host[(fabric.host >= 0) & np.isin(switch, list(first))]).tolist()
    # The host with most adapters comes first, so that the search for a pattern finds it.
    beside.sort(key=lambda host: int(bounds[host] - bounds[host + 1]))
    patterns: dict[int, dict[tuple[int, ...], int]] = defaultdict(dict)
    for host in beside:
        pattern = on(host)
        for each in first.intersection(pattern):
            patterns[each].setdefault(pattern, host)

    def on_rails(host: int) -> dict[int, int]:
        """The adapter on each rail."""
        own = on(host)
        pattern, other = next(
            (pattern, other) for pattern, other in patterns[own[0]].items() if Counter(own) <= Counter(pattern)
        )
        rails = _match(fabric.subnet[adapters(other)].tolist(), whole)
        return {rails[place]: adapter for place, adapter in zip(_match(own, pattern), adapters(host), strict=True)}

    by_host_rails = [on_rails(host) for host in hosts]
    common = sorted(set.intersection(*(set(rails) for rails in by_host_rails)))
    if common:
        return np.array([[rails[rail] for rail in common] for rails in by_host_rails], np.int32)
    fewest = min(len(adapters(host)) for host in hosts)
    return np.array([adapters(host)[:fewest] for host in hosts], np.int32)


def _match(keys: Sequence[int], pattern: Sequence[int]) -> list[int]:
    """Each key's place in the pattern, equal keys in turn; 0, 1, … where the pattern lacks a key."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, key in enumerate(pattern):
        places[key].append(place)
    if Counter(keys) <= Counter(pattern):
        return [places[key].pop(0) for key in keys]
    return list(range(len(keys)))

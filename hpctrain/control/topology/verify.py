"""Compares measurements between hosts with the fabric, and finds the slow host, adapter or link."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hpctrain.common.errors import HpctrainError
from hpctrain.control.topology.fabric import Fabric, Floats
from hpctrain.control.topology.routes import Routes
from hpctrain.control.topology.summary import host_numbers

# A flow is slow below this share of what flows usually reach.
SLOW = 0.7
# MPI usually reaches nine tenths of the payload rate; below half of it another network or transport is in use.
_WRONG_NETWORK = 0.5

Kind = Literal["fabric", "host", "adapter", "link", "flow"]
Direction = Literal["both", "sends", "receives"]

_WIDEST_FIRST: tuple[Kind, ...] = ("host", "adapter", "link")


@dataclass(frozen=True, kw_only=True)
class End:
    """An end of a flow: a host and its adapter, or the rank where there is no InfiniBand."""

    host: str
    device: str

    def __str__(self) -> str:
        return f"{self.host} {self.device}"


@dataclass(frozen=True, kw_only=True)
class Flow:
    """One measurement. Flows of the same round ran at the same time.

    Attributes:
        bandwidth: bytes a second, the best of several measurements.
        spread: how far the usual measurement was below the best, as a share of the best.
    """

    round: int
    source: End
    target: End
    bandwidth: float
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A part of the network that may slow down the flows through it; a link, which has one direction, has ``both``."""

    kind: Kind
    name: str
    direction: Direction = "both"

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" + ("" if self.direction == "both" else f" {self.direction}")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A part of the network that is slower than the rest, or for the kind ``fabric`` the whole network.

    Attributes:
        kind: ``flow`` where both ends and every link between them do well with others.
        reached: the median of its slow flows, as a share of the usual bandwidth.
        flows: the number of flows that it explains.
        direction: in which a host or an adapter is slow, ``sends`` or ``receives``.
        alternatives: other parts that explain the same flows as well.
    """

    kind: Kind
    name: str
    reached: float
    flows: int
    direction: Direction = "both"
    alternatives: tuple[str, ...] = ()

    def __str__(self) -> str:
        many = "1 flow" if self.flows == 1 else f"{self.flows} flows"
        promise = "what its links carry" if self.kind == "fabric" else "the usual bandwidth"
        reached = f"{self.reached:.0%}" if self.reached >= 0.01 else "less than 1%"
        verb = ":" if self.direction == "both" else f" {self.direction} at"
        text = f"{self.kind} {self.name}{verb} {reached} of {promise} ({many})"
        return f"{text}; or {', '.join(self.alternatives)}" if self.alternatives else text


def rounds(stations: int, rails: int = 1) -> list[list[tuple[int, int]]]:
    """The pairs of ranks that send at the same time: in one round a rank sends or receives, never both.

    Stations 1, 2, 4, 8 … places apart are measured both ways: the ring's neighbours, and, because the order of a ring
    keeps the hosts of a leaf together, ever more distant leaves. The number of rounds grows with the logarithm.

    Args:
        stations: the length of the ring; station s has ranks s * rails to (s + 1) * rails - 1.
        rails: the ranks of a station; each sends to ranks of its rail, all rails at once.
    """
    found: list[list[tuple[int, int]]] = []
    distance = 1
    while distance <= stations // 2:
        pairs = dict.fromkeys(tuple(sorted((one, (one + distance) % stations))) for one in range(stations))
        for matching in _matchings((one, other) for one, other in pairs):
            found += [matching, [(other, one) for one, other in matching]]
        distance *= 2
    return [[(a * rails + rail, b * rails + rail) for a, b in each for rail in range(rails)] for each in found]


def _matchings(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The pairs in groups in which no station appears twice."""
    groups: list[list[tuple[int, int]]] = []
    busy: list[set[int]] = []
    for one, other in pairs:
        free = (number for number, taken in enumerate(busy) if not taken & {one, other})
        number = next(free, len(groups))
        if number == len(groups):
            groups.append([])
            busy.append(set())
        groups[number].append((one, other))
        busy[number] |= {one, other}
    return groups


def compare(flows: Sequence[Flow], fabric: Fabric | None = None, *, slow: float = SLOW) -> tuple[Fault, ...]:
    """The faults that explain the slow flows, those of most flows first; empty if there is none.

    A flow's bandwidth is compared with that of the narrowest link on its path, shared with the other flows of its
    round, and with what is :func:`usual`. Where the measurements of single flows vary much, the limit is lower, so that
    a flow's ordinary variation is no fault. For the explanation of slow flows see
    :func:`explain`.

    Two hosts can be compared only with each other: a host that is slow in both directions is then not found, unless
    the fabric has speeds, and if one direction is slow, either host may be the cause.

    Args:
        flows: at least one flow.
        fabric: None compares the flows only with each other.
        slow: a flow is slow below this share of the usual bandwidth, less the usual spread of one flow's measurements.

    Raises:
        HpctrainError: the fabric lacks a host or adapter of the flows.
    """
    promised, links = _promises(flows, fabric)
    names = [f"{flow.source} -> {flow.target}" for flow in flows]
    share = np.array([flow.bandwidth for flow in flows]) / promised
    best_share = usual(share, flows)
    steady = 1 - float(np.median([flow.spread for flow in flows]))
    faults = explain(share / best_share, slow * steady, _suspects(flows, links), names)
    if fabric is not None and fabric.has_speeds and best_share < _WRONG_NETWORK:
        faults.insert(0, Fault(kind="fabric", name="as a whole", reached=best_share, flows=len(flows)))
    return tuple(faults)


def incomparable(flows: Sequence[Flow], fabric: Fabric | None) -> bool:
    """Whether a slow link cannot be recognised: there are only two hosts, and link speeds are unknown."""
    hosts = {end.host for flow in flows for end in (flow.source, flow.target)}
    return len(hosts) == 2 and (fabric is None or not fabric.has_speeds)


def _promises(flows: Sequence[Flow], fabric: Fabric | None) -> tuple[Floats, list[tuple[str, ...]]]:
    """For each flow, its share of its links' bandwidth, and the names of those between switches."""
    if fabric is None:
        return np.ones(len(flows)), [()] * len(flows)
    ends = {end: adapter_of(fabric, end) for flow in flows for end in (flow.source, flow.target)}
    source = np.array([ends[flow.source] for flow in flows], np.int32)
    target = np.array([ends[flow.target] for flow in flows], np.int32)
    paths = Routes(fabric).paths(source, target)
    rounds_of_links = np.repeat([flow.round for flow in flows], np.diff(paths.start))
    together = rounds_of_links * len(fabric.source) + paths.link
    _, inverse, count = np.unique(together, return_inverse=True, return_counts=True)
    # A tree of names, such as Slurm's, has a single link where the real fabric may have many.
    share = fabric.bandwidth[paths.link] / (count[inverse] if fabric.has_speeds else 1)
    between = (fabric.level[fabric.source] > 0) & (fabric.level[fabric.target] > 0)
    parts = [paths.link[start:end] for start, end in zip(paths.start, paths.start[1:], strict=False)]
    names = [tuple(_link(fabric, link) for link in part[between[part]].tolist()) for part in parts]
    return np.minimum.reduceat(share, paths.start[:-1]), names


def adapter_of(fabric: Fabric, end: End) -> int:
    """The adapter of an end, by name or as the only one of its host; an adapter that the fabric lacks is an error."""
    [host] = host_numbers(fabric, [end.host])
    adapters = fabric.adapters(host).tolist()
    named = [adapter for adapter in adapters if fabric.names[adapter] == str(end)]
    if not named and len(adapters) > 1:
        known = ", ".join(fabric.names[adapter] for adapter in adapters)
        raise HpctrainError(
            "HT-not-in-fabric",
            "adapter {adapter!r} was measured, but the fabric does not have it",
            f"it has {known}",
            adapter=str(end),
        )
    return int((named or adapters)[0])


def _link(fabric: Fabric, link: int) -> str:
    return (
        f"{fabric.names[fabric.source[link]]} -> {fabric.names[fabric.target[link]]} (port {fabric.source_port[link]})"
    )


def _suspects(flows: Sequence[Flow], links: Sequence[tuple[str, ...]]) -> list[set[Suspect]]:
    """The parts that each flow used. An adapter stands for its cable too, a host with one measured adapter for both."""
    devices: dict[str, set[str]] = defaultdict(set)
    for flow in flows:
        for end in (flow.source, flow.target):
            devices[end.host].add(end.device)
    directions: tuple[Direction, Direction] = ("sends", "receives")
    suspects = []
    for flow, between in zip(flows, links, strict=True):
        parts = {Suspect(kind="link", name=name) for name in between}
        for end, direction in zip((flow.source, flow.target), directions, strict=True):
            parts.add(Suspect(kind="host", name=end.host, direction=direction))
            if len(devices[end.host]) > 1:
                parts.add(Suspect(kind="adapter", name=str(end), direction=direction))
        suspects.append(parts)
    return suspects


def usual(values: Floats, flows: Sequence[Flow]) -> float:
    """The median over ends of each end's best value with any partner.

    The median over flows would be slow if one of three ends is slow, because it takes part in most flows.

    Args:
        values: one per flow; higher values are better.
        flows: at least one flow.
    """
    best: dict[End, float] = defaultdict(float)
    for value, flow in zip(values.tolist(), flows, strict=True):
        for end in (flow.source, flow.target):
            best[end] = max(best[end], value)
    return sorted(best.values(), reverse=True)[(len(best) - 1) // 2]


def explain(
    reached: Floats, least: float, suspects: Sequence[Collection[Suspect]], names: Sequence[str]
) -> list[Fault]:
    """The faults that explain the slow flows, those of most flows first.

    Every part that a good flow used is innocent. Of the other parts, the fewest that together explain all slow flows
    are named.

    Args:
        reached: per flow, the share of the usual value.
        least: a flow is slow below this share.
        suspects: per flow, the parts that it used.
        names: per flow, its name as a fault where all of its parts are innocent.
    """
    slow = np.flatnonzero(reached < least).tolist()
    innocent = {suspect for flow in np.flatnonzero(reached >= least).tolist() for suspect in suspects[flow]}
    through: dict[Suspect, set[int]] = defaultdict(set)
    for flow in slow:
        for suspect in set(suspects[flow]) - innocent:
            through[suspect].add(flow)
    alone = set(slow).difference(*through.values())
    causes = [*_smallest_cover(through), *(([Suspect(kind="flow", name=names[flow])], {flow}) for flow in alone)]
    causes.sort(key=lambda cause: (-len(cause[1]), str(cause[0][0])))
    return [
        Fault(
            kind=first.kind,
            name=first.name,
            reached=float(np.median(reached[sorted(flows)])),
            flows=len(flows),
            direction=first.direction,
            alternatives=tuple(map(str, others)),
        )
        for (first, *others), flows in causes
    ]


def _smallest_cover(through: Mapping[Suspect, Collection[int]]) -> Iterator[tuple[list[Suspect], set[int]]]:
    """Groups of parts that explain the same flows, with these flows; the groups together explain every flow.

    The first part of a group is the widest, since any part of it may be the cause.
    """
    unexplained = set().union(*through.values())
    while unexplained:
        alike: dict[frozenset[int], list[Suspect]] = defaultdict(list)
        for suspect in sorted(through, key=_rank):
            alike[frozenset(through[suspect]) & unexplained].append(suspect)
        # A part whose flows are all explained by a wider one is never needed.
        largest = [flows for flows in alike if not any(flows < others for others in alike)]
        explained_by = Counter(flow for flows in largest for flow in flows)
        proven = [flows for flows in largest if any(explained_by[flow] == 1 for flow in flows)]
        # Where every flow has several explanations left, the one with most flows is taken.
        for flows in proven or [min(largest, key=lambda flows: (-len(flows), *map(_rank, alike[flows])))]:
            yield alike[flows], set(flows)
            unexplained -= flows


def _rank(suspect: Suspect) -> tuple[int, str, str]:
    return _WIDEST_FIRST.index(suspect.kind), suspect.name, suspect.direction


def rate(bandwidth: float) -> str:
    """Bytes a second for people: ``117 MB/s``, ``48.3 GB/s``."""
    return f"{bandwidth / 1e9:.1f} GB/s" if bandwidth >= 1e9 else f"{bandwidth / 1e6:.3g} MB/s"

"""Compares measurements between hosts with the fabric, and finds the slow host, adapter or link."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hpctrain.errors import HpctrainError
from hpctrain.topology.fabric import Fabric, Floats, Ints
from hpctrain.topology.routes import Routes
from hpctrain.topology.summary import host_numbers

Kind = Literal["fabric", "host", "adapter", "link", "flow"]
Suspect = tuple[Kind, str]
# Where two explain the same flows, the wider is named: its parts cannot be told apart.
_WIDEST_FIRST: tuple[Kind, ...] = ("host", "adapter", "link")

# A flow is slow below this share of what flows usually reach, and late above this multiple of the usual latency.
SLOW = 0.7
LATE = 3.0
# Well-behaved MPI carries nine tenths of the payload rate; half of it means another network, or another transport.
_WRONG_NETWORK = 0.5


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
        latency: seconds of one way, with nothing else on the way of this flow; the best as well.
        spread: how far its usual measurement was below the best, a share of the best.
    """

    round: int
    source: End
    target: End
    bandwidth: float
    latency: float
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something slower than the rest; for the kind ``fabric``, the whole.

    Attributes:
        kind: ``flow`` where both ends and every link between them do well with others.
        reached: the median of its slow flows: a share of the usual bandwidth, or a multiple of the usual latency.
        flows: how many flows it explains.
    """

    kind: Kind
    name: str
    quantity: Literal["bandwidth", "latency"]
    reached: float
    flows: int

    def __str__(self) -> str:
        many = "1 flow" if self.flows == 1 else f"{self.flows} flows"
        if self.quantity == "latency":
            return f"{self.kind} {self.name}: {self.reached:.1f} times the usual latency ({many})"
        promise = "what its links carry" if self.kind == "fabric" else "the usual bandwidth"
        return f"{self.kind} {self.name}: {self.reached:.0%} of {promise} ({many})"


def rounds(stations: int, rails: int = 1) -> list[list[tuple[int, int]]]:
    """The pairs of ranks that send at the same time: in one round a rank sends or receives, never both.

    Stations 1, 2, 4, 8 … places apart are measured both ways: the ring's neighbours, and, because the order of a ring
    keeps the hosts of a leaf together, ever more distant leaves. The number of rounds grows with the logarithm.

    Args:
        stations: how many, in the order of the ring; station s has ranks s * rails to (s + 1) * rails - 1.
        rails: ranks a station; each meets those of the same rail, all rails at once.
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
    """The pairs in groups in which nobody appears twice."""
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
    """The faults that explain the slow flows, the best explanation first; empty if there is none.

    A flow's bandwidth is judged by that of the narrowest link on its way, shared with the other flows of its round,
    and by what the median flow reaches of its own; its latency by the median of flows over as many links. Where the
    measurements of one flow differ much, less is slow: no flow is accused of what all of them do now and then.
    Everything that a good flow used is innocent. Of the rest, the fewest that explain all slow flows are named, found
    greedily.

    Args:
        flows: at least one.
        fabric: None compares the flows with each other alone.
        slow: a flow is slow below this share of the median flow, less the usual spread of one flow's measurements.

    Raises:
        HpctrainError: a host or adapter that the fabric does not have.
    """
    promised, hops, links = _promises(flows, fabric)
    suspects = _suspects(flows, links)
    reached = np.array([flow.bandwidth for flow in flows]) / promised
    steady = 1 - float(np.median([flow.spread for flow in flows]))
    faults = _explain(reached / np.median(reached), slow * steady, suspects, flows, "bandwidth")
    faults += _explain(_usual_latency(flows, hops), steady / LATE, suspects, flows, "latency")
    if fabric is not None and fabric.has_speeds and np.median(reached) < _WRONG_NETWORK:
        whole = Fault(
            kind="fabric", name="as a whole", quantity="bandwidth", reached=float(np.median(reached)), flows=len(flows)
        )
        faults.insert(0, whole)
    return tuple(faults)


def _promises(flows: Sequence[Flow], fabric: Fabric | None) -> tuple[Floats, Ints, list[tuple[str, ...]]]:
    """For each flow: the bandwidth that its links leave it, their number, and the names of those between switches."""
    if fabric is None:
        return np.ones(len(flows)), np.zeros(len(flows), np.int32), [()] * len(flows)
    ends = {end: adapter_of(fabric, end) for flow in flows for end in (flow.source, flow.target)}
    source = np.array([ends[flow.source] for flow in flows], np.int32)
    target = np.array([ends[flow.target] for flow in flows], np.int32)
    routes = Routes(fabric)
    paths = routes.paths(source, target)
    hops = np.diff(paths.start)
    together = np.repeat([flow.round for flow in flows], hops) * len(fabric.source) + paths.link
    _, inverse, count = np.unique(together, return_inverse=True, return_counts=True)
    # A tree of names alone, such as Slurm's, has one link where the fabric may have many.
    share = fabric.bandwidth[paths.link] / (count[inverse] if fabric.has_speeds else 1)
    between = (fabric.level[fabric.source] > 0) & (fabric.level[fabric.target] > 0)
    parts = [paths.link[start:end] for start, end in zip(paths.start, paths.start[1:], strict=False)]
    names = [tuple(_link(fabric, link) for link in part[between[part]].tolist()) for part in parts]
    # Of a flow whose links nobody knows only the cable by which it leaves is sure to be on its way.
    promised = fabric.bandwidth[routes.cable(source)]
    known = np.flatnonzero(hops)
    promised[known] = np.minimum.reduceat(share, paths.start[known]) if known.size else promised[known]
    return promised, hops.astype(np.int32), names


def adapter_of(fabric: Fabric, end: End) -> int:
    """The adapter of an end: by name, or the only one of its host.

    Raises:
        HpctrainError: the fabric does not have it.
    """
    [host] = host_numbers(fabric, [end.host])
    adapters = fabric.adapters(host).tolist()
    named = [adapter for adapter in adapters if fabric.names[adapter] == str(end)]
    if not named and len(adapters) > 1:
        known = ", ".join(fabric.names[adapter] for adapter in adapters)
        raise HpctrainError(f"adapter {str(end)!r} was measured, but the fabric does not have it", f"it has {known}")
    return int((named or adapters)[0])


def _link(fabric: Fabric, link: int) -> str:
    return (
        f"{fabric.names[fabric.source[link]]} -> {fabric.names[fabric.target[link]]} (port {fabric.source_port[link]})"
    )


def _suspects(flows: Sequence[Flow], links: Sequence[tuple[str, ...]]) -> list[list[Suspect]]:
    """The parts that each flow used. An adapter stands for its cable too, a host with one measured adapter for both."""
    devices: dict[str, set[str]] = defaultdict(set)
    for flow in flows:
        for end in (flow.source, flow.target):
            devices[end.host].add(end.device)
    return [
        [("host", end.host) for end in (flow.source, flow.target)]
        + [("adapter", str(end)) for end in (flow.source, flow.target) if len(devices[end.host]) > 1]
        + [("link", name) for name in between]
        for flow, between in zip(flows, links, strict=True)
    ]


def _usual_latency(flows: Sequence[Flow], hops: Ints) -> Floats:
    """For each flow: the median latency over as many links, divided by its own."""
    latency = np.array([flow.latency for flow in flows])
    usual = np.array([np.median(latency[hops == hop]) for hop in hops.tolist()])
    relative: Floats = usual / latency
    return relative


def _explain(
    reached: Floats,
    least: float,
    suspects: Sequence[Sequence[Suspect]],
    flows: Sequence[Flow],
    quantity: Literal["bandwidth", "latency"],
) -> list[Fault]:
    innocent = {suspect for flow in np.flatnonzero(reached >= least).tolist() for suspect in suspects[flow]}
    open_flows = set(np.flatnonzero(reached < least).tolist())
    faults = []
    while open_flows:
        seen = Counter(suspect for flow in open_flows for suspect in set(suspects[flow]) - innocent)
        if seen:
            kind, name = min(seen, key=lambda s: (-seen[s], _WIDEST_FIRST.index(s[0]), s[1]))
            explained = {flow for flow in open_flows if (kind, name) in suspects[flow]}
        else:
            first = min(open_flows)
            kind, name, explained = "flow", f"{flows[first].source} -> {flows[first].target}", {first}
        share = float(np.median(reached[sorted(explained)]))
        faults.append(
            Fault(
                kind=kind,
                name=name,
                quantity=quantity,
                reached=share if quantity == "bandwidth" else 1 / share,
                flows=len(explained),
            )
        )
        open_flows -= explained
    return faults

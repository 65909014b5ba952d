"""The links that flows use in a fabric, by forwarding tables or by shortest paths, and the number of flows on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.errors import HpctrainError
from hpctrain.control.topology.fabric import NO_PORT, Fabric, Floats, Ints, hops

# InfiniBand's own limit on the hops of a path: a flow with more hops is in a loop.
MOST_HOPS = 64

_NONE = np.empty(0, np.int32)

Ports = NDArray[np.int16]


@dataclass(frozen=True, kw_only=True)
class Paths:
    """The directed links of each flow, in order: flow ``i`` has ``link[start[i]:start[i + 1]]``."""

    start: Ints
    link: Ints


class Routes:
    """Follows forwarding tables: those of the fabric, or minimum-hop tables computed where none were read."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self._ports: Callable[[Ints, Ints], Ports]
        if fabric.tables is None:
            min_hop = MinHop(fabric)
            self._ports, switches = min_hop.ports, min_hop.switches
        else:
            self._ports, switches = _given_ports(fabric, fabric.tables), fabric.table_switches
        self._row = np.full(len(fabric.names), -1, np.int32)
        self._row[switches] = np.arange(len(switches))
        # The link behind each port of each switch; the last column, which stays without one, is NO_PORT's.
        self._behind = np.full((len(switches), fabric.source_port.max(initial=0) + 2), -1, np.int32)
        from_switch = self._row[fabric.source] >= 0
        self._behind[self._row[fabric.source[from_switch]], fabric.source_port[from_switch]] = np.flatnonzero(
            from_switch
        )
        # An adapter sends by its cable.
        self._cable = np.full(len(fabric.names), -1, np.int32)
        own = np.flatnonzero(fabric.level[fabric.source] == 0)[::-1]
        self._cable[fabric.source[own]] = own

    def paths(self, source: Ints, target: Ints) -> Paths:
        """The links from each source to the target at the same index, both adapters; empty from an adapter to itself.

        Raises:
            HpctrainError: a flow reaches a switch whose table has no port for its target, or is in a loop.
        """
        flow, link = self._flow_links(source, target)
        return Paths(
            start=np.concatenate([[0], np.cumsum(np.bincount(flow, minlength=len(source)))]).astype(np.int32),
            link=link[np.argsort(flow, kind="stable")].astype(np.int32),
        )

    def loads(self, source: Ints, target: Ints, weight: float | Floats = 1.0) -> Floats:
        """The load of each directed link: the sum of the weights of its flows. For errors see :meth:`paths`."""
        flow, link = self._flow_links(source, target)
        weights = np.broadcast_to(np.float64(weight), len(source))[flow]
        return np.bincount(link, weights, minlength=len(self.fabric.source)).astype(np.float64)

    def faults(self) -> Iterator[str]:
        """A sentence for each switch and adapter of one subnet between which the tables lead nowhere."""
        fabric = self.fabric
        switches, adapters = np.flatnonzero(self._row >= 0), np.flatnonzero(fabric.level == 0)
        for switch in switches:
            target = adapters[fabric.subnet[adapters] == fabric.subnet[switch]].astype(np.int32)
            _, _, lost, at = self._walk(np.full_like(target, switch), target)
            for flow, where in zip(lost, at, strict=True):
                yield self._no_route(int(switch), int(target[flow]), int(where)).message

    def _flow_links(self, source: Ints, target: Ints) -> tuple[Ints, Ints]:
        """Flow and link of each hop."""
        flow, link, lost, at = self._walk(source, target)
        if lost.size:
            raise self._lost(int(source[lost[0]]), int(target[lost[0]]), int(at[0]))
        return flow, link

    def _walk(self, source: Ints, target: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Follow all flows, one link at a time.

        Returns:
            flow and link of each hop, in the order taken; the flows that got lost, and the node where each did.
        """
        at = np.array(source)
        flow = np.flatnonzero(at != target).astype(np.int32)
        flows, links, astray = [_NONE], [_NONE], [_NONE]
        for _ in range(MOST_HOPS):
            link = self._next(at[flow], target[flow])
            astray.append(flow[link < 0])
            flow, link = flow[link >= 0], link[link >= 0]
            flows.append(flow)
            links.append(link)
            at[flow] = self.fabric.target[link]
            flow = flow[at[flow] != target[flow]]
            if not flow.size:
                break
        lost = np.concatenate([*astray, flow])
        return np.concatenate(flows), np.concatenate(links), lost, at[lost]

    def _next(self, node: Ints, target: Ints) -> Ints:
        """The link by which each flow leaves ``node``, -1 where it cannot; a wrong adapter sends it back."""
        link = self._cable[node]
        switches = np.flatnonzero(self._row[node] >= 0)
        row = self._row[node[switches]]
        port = self._ports(row, target[switches])
        # A table may name a port that the switch does not have.
        known = np.where(port < self._behind.shape[1], port, NO_PORT)
        link[switches] = self._behind[row, known]
        return link

    def _lost(self, source: int, target: int, at: int) -> HpctrainError:
        names, subnet = self.fabric.names, self.fabric.subnet
        if subnet[source] != subnet[target]:
            return HpctrainError(
                "HT-topology-no-route",
                "no cables lead from {source} to {target}: they are on separate subnets",
                "take hosts of one subnet at a time",
                source=names[source],
                target=names[target],
            )
        return self._no_route(source, target, at)

    def _no_route(self, source: int, target: int, at: int) -> HpctrainError:
        hint = "is a switch or a cable missing in the listing? discover the fabric again"
        if self.fabric.tables is not None:
            hint = (
                "tables and cables must be from the same day; without tables (no --routes) hpctrain assumes shortest "
                "paths"
            )
        names = self.fabric.names
        return HpctrainError(
            "HT-topology-no-route",
            "no route from {source} to {target}: it ends or loops at {at}",
            hint,
            source=names[source],
            target=names[target],
            at=names[at],
        )


def _given_ports(fabric: Fabric, tables: Ports) -> Callable[[Ints, Ints], Ports]:
    """The port of each row of the tables towards the adapter at the same index, or ``NO_PORT``."""
    # One more column, without ports, for LIDs that no table has.
    table = np.pad(tables, ((0, 0), (0, 1)), constant_values=NO_PORT)
    last = table.shape[1] - 1
    column = np.where((fabric.lid > 0) & (fabric.lid < last), fabric.lid, last)

    def ports(row: Ints, target: Ints) -> Ports:
        found: Ports = table[row, column[target]]
        return found

    return ports


class MinHop:
    """Shortest paths over switches; in a fat tree they go up and then down.

    The destination selects one of equally short paths, by the rule known as D-mod-k (Zahavi, "D-Mod-K Routing Providing
    Non-Blocking Traffic for Shift Permutations on Real Life Fat Trees", 2010): destinations are numbered leaf by leaf;
    the cable between levels ``h`` and ``h + 1`` is that number, divided by the up links of the levels below ``h``,
    modulo the number of such cables.

    Attributes:
        switches: the nodes that forward traffic.
    """

    def __init__(self, fabric: Fabric) -> None:
        level, nodes = fabric.level, len(fabric.names)
        self._level = level
        self.switches = np.flatnonzero(level > 0).astype(np.int32)
        from_switch = level[fabric.source] > 0
        down = np.flatnonzero(from_switch & (level[fabric.target] == 0))
        down = down[np.lexsort((fabric.source_port[down], fabric.source[down]))]
        adapters = fabric.target[down]
        self._number = np.full(nodes, -1, np.int32)
        self._number[adapters] = np.arange(len(adapters))
        self._leaf = np.full(nodes, -1, np.int32)
        self._leaf[adapters] = fabric.source[down]
        cables = np.flatnonzero(from_switch & (level[fabric.target] > 0))
        # Parallel cables are adjacent, so that the paths up and down use the same one.
        cables = cables[np.lexsort((fabric.source_port[cables], fabric.target[cables], fabric.source[cables]))]
        self._far, self._port = fabric.target[cables], fabric.source_port[cables]
        self._first = np.searchsorted(fabric.source[cables], np.arange(nodes + 1))
        self._divisors = _divisors(level, fabric.source[cables], self._far)
        leaves = np.unique(fabric.source[down])
        self._hops = hops(leaves, self._first, self._far)
        self._column = np.full(nodes, -1, np.int32)
        self._column[leaves] = np.arange(len(leaves))
        # The port of each cable down, by the numbers of its switch and adapter.
        number = fabric.source[down] * np.int64(nodes) + adapters
        order = np.argsort(number)
        self._down, self._down_port = number[order], fabric.source_port[down][order]

    def ports(self, row: Ints, target: Ints) -> Ports:
        """The port of each of ``switches`` by number towards the adapter at the same index, or ``NO_PORT``."""
        switch = self.switches[row]
        ports = np.full(len(switch), NO_PORT, np.int16)
        number = switch * np.int64(len(self._leaf)) + target
        at = np.searchsorted(self._down, number)
        here = np.flatnonzero(self._down[np.minimum(at, len(self._down) - 1)] == number) if len(self._down) else at[:0]
        ports[here] = self._down_port[at[here]]
        away = np.flatnonzero((ports == NO_PORT) & (self._leaf[target] >= 0))
        ports[away] = self._towards(switch[away], target[away])
        return ports

    def _towards(self, switch: Ints, target: Ints) -> Ports:
        """The ports towards adapters of other leaves."""
        column = self._column[self._leaf[target]]
        begin, end = self._first[switch], self._first[switch + 1]
        cable, flow = _ranges(begin, end), np.repeat(np.arange(len(switch)), end - begin)
        nearer = self._hops[self._far[cable], column[flow]] == (self._hops[switch, column] - 1)[flow]
        cable, flow = cable[nearer], flow[nearer]
        ways = np.bincount(flow, minlength=len(switch))
        ports = np.full(len(switch), NO_PORT, np.int16)
        known = np.flatnonzero(ways)
        start = (np.cumsum(ways) - ways)[known]
        crossed = np.minimum(self._level[switch[known]], self._level[self._far[cable[start]]])
        digit = self._number[target[known]] // self._divisors[crossed]
        ports[known] = self._port[cable[start + digit % ways[known]]]
        return ports


def _ranges(begin: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """The integers from each begin to before its end, one range after the other."""
    count = end - begin
    numbers: NDArray[np.int64] = np.arange(count.sum()) + np.repeat(begin - (np.cumsum(count) - count), count)
    return numbers


def _divisors(level: Ints, near: Ints, far: Ints) -> NDArray[np.int64]:
    """For each level: the product of the usual numbers of up links on the levels below."""
    up = np.bincount(near, level[far] > level[near], minlength=len(level))
    heights = range(1, int(level.max(initial=1)) + 1)
    # A level may have no switch, as where hosts are cabled to each other.
    widths = [max(1, int(np.median(up[level == height]))) if (level == height).any() else 1 for height in heights]
    divisors: NDArray[np.int64] = np.cumprod([1, 1, *widths[:-1]], dtype=np.int64)
    return divisors


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Flows that run at the same time; the next phase begins when all have arrived.

    Attributes:
        source, target: adapters' nodes, one pair per flow.
        share: the fraction of the reduced buffer that each flow carries.
        repeats: the number of consecutive equal steps.
    """

    source: Ints
    target: Ints
    share: float
    repeats: int = 1


def rail_rings(adapters: Ints) -> list[Phase]:
    """One ring per rail over the same order of hosts; each rail reduces an equal part of the buffer.

    A ring is a reduce-scatter, then an all-gather, each n - 1 steps of one n-th (Patarasuk and Yuan, 2009).

    Args:
        adapters: nodes, of shape (hosts, rails).
    """
    hosts, rails = adapters.shape
    if hosts < 2:
        return []
    following = np.roll(adapters, -1, axis=0)
    return [Phase(source=adapters.ravel(), target=following.ravel(), share=1 / hosts / rails, repeats=2 * (hosts - 1))]


def double_tree(adapters: Ints) -> list[Phase]:
    """Two binary trees per rail over the same order of hosts, each of which reduces one half to its root and broadcasts
    it again (Sanders, Speck and Traeff, 2009, https://doi.org/10.1016/j.parco.2009.09.001).

    The halves are sent in many pieces, so that all edges are busy in both directions at once: one phase has them all. A
    host with children in one tree has none in the other, or one if the number of hosts is odd. The trees are those of
    NCCL (ncclGetBtree and ncclGetDtree, https://github.com/NVIDIA/nccl/blob/master/src/graph/trees.cc).

    Args:
        adapters: nodes, of shape (hosts, rails).
    """
    hosts, rails = adapters.shape
    if hosts < 2:
        return []
    edges = [parents(hosts), second_parents(hosts)]
    child = np.concatenate([adapters[parent >= 0] for parent in edges]).ravel()
    above = np.concatenate([adapters[parent[parent >= 0]] for parent in edges]).ravel()
    return [
        Phase(source=np.concatenate([child, above]), target=np.concatenate([above, child]), share=1 / 2 / rails),
    ]


def parents(hosts: int) -> Ints:
    """The parent of each host in an in-order binary tree whose leaves are the odd hosts; -1 for its root, host 0."""
    host = np.arange(hosts, dtype=np.int32)
    lowest = host & -host
    over = (host ^ lowest) | (lowest << 1)
    parent: Ints = np.where(over < hosts, over, host ^ lowest).astype(np.int32)
    parent[0] = -1
    return parent


def second_parents(hosts: int) -> Ints:
    """The parents in the second tree, in which leaves of the first have children: it is mirrored, or shifted by one."""
    first = parents(hosts)
    if hosts % 2 == 0:
        mirrored: Ints = np.where(first[::-1] >= 0, hosts - 1 - first[::-1], -1).astype(np.int32)
        return mirrored
    shifted = np.roll(first, 1)
    moved: Ints = np.where(shifted >= 0, (shifted + 1) % hosts, -1).astype(np.int32)
    return moved


def predict_allreduce(routes: Routes, steps: Sequence[Phase], size: float) -> float:
    """Seconds of an all-reduce of ``size`` bytes: for each step those of the bytes on its slowest link.

    Exact where the flows of a step carry the same and share links fairly.

    Args:
        steps: from ``rail_rings`` or ``double_tree``.

    Raises:
        HpctrainError: two adapters have no route.
    """
    seconds = 0.0
    for step in steps:
        loads = routes.loads(step.source, step.target)
        slowest = float((loads / routes.fabric.bandwidth).max(initial=0.0))
        seconds += step.repeats * (size * step.share * slowest)
    return seconds

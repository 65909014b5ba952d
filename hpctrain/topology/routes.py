"""The links that flows take through a fabric, and how many flows share each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hpctrain.errors import HpctrainError
from hpctrain.topology.fabric import NO_PORT, Fabric, Floats, Ints
from hpctrain.topology.min_hop import min_hop_tables

# InfiniBand's own limit on the hops of a path: whoever takes more goes round in circles.
MOST_HOPS = 64

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, kw_only=True)
class Paths:
    """The directed links of each flow in the order taken: flow ``i`` has ``link[start[i]:start[i + 1]]``.

    Attributes:
        start: (flows + 1,).
        link: numbers of the fabric's directed links.
    """

    start: Ints
    link: Ints


class Routes:
    """Follows forwarding tables: the fabric's own, or minimum-hop tables made for it where none were read."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        if fabric.tables is None:
            self._table, switches, self._column = min_hop_tables(fabric)
        else:
            # A column more, so that a LID that no table knows has one as well.
            self._table, switches = (
                np.pad(fabric.tables, ((0, 0), (0, 1)), constant_values=NO_PORT),
                fabric.table_switches,
            )
            last = self._table.shape[1] - 1
            self._column = np.where((fabric.lid > 0) & (fabric.lid < last), fabric.lid, last)
        self._row = np.full(len(fabric.names), -1, np.int32)
        self._row[switches] = np.arange(len(switches))
        # The link behind each port of each switch; index NO_PORT is the last column, which stays without one.
        ports = max(fabric.source_port.max(initial=0), self._table.max(initial=0)) + 2
        self._behind = np.full((len(switches), ports), -1, np.int32)
        from_switch = self._row[fabric.source] >= 0
        self._behind[self._row[fabric.source[from_switch]], fabric.source_port[from_switch]] = np.flatnonzero(
            from_switch
        )
        self._cable = np.full(len(fabric.names), -1, np.int32)
        self._cable[fabric.source[::-1]] = np.arange(len(fabric.source))[::-1]

    def paths(self, source: Ints, target: Ints) -> Paths:
        """The links from each source to the target at the same index, both adapters; none from an adapter to itself.

        Raises:
            HpctrainError: a flow comes to a switch whose table has no way on, or goes round in circles.
        """
        flow, link = self._flow_links(source, target)
        return Paths(
            start=np.concatenate([[0], np.cumsum(np.bincount(flow, minlength=len(source)))]).astype(np.int32),
            link=link[np.argsort(flow, kind="stable")].astype(np.int32),
        )

    def loads(self, source: Ints, target: Ints, weight: float | Floats = 1.0) -> Floats:
        """What each directed link of the fabric carries: the sum of the weights of the flows that take it.

        Raises:
            HpctrainError: as of ``paths``.
        """
        flow, link = self._flow_links(source, target)
        weights = np.broadcast_to(np.float64(weight), len(source))[flow]
        return np.bincount(link, weights, minlength=len(self.fabric.source)).astype(np.float64)

    def faults(self) -> Iterator[str]:
        """A sentence for each switch and adapter of one subnet where the tables do not lead from one to the other."""
        fabric = self.fabric
        switches, adapters = np.flatnonzero(self._row >= 0), np.flatnonzero(fabric.level == 0)
        for switch in switches:
            target = adapters[fabric.subnet[adapters] == fabric.subnet[switch]].astype(np.int32)
            _, _, lost, at = self._walk(np.full_like(target, switch), target)
            for flow, where in zip(lost, at, strict=True):
                yield self._explain(int(switch), int(target[flow]), int(where))

    def _flow_links(self, source: Ints, target: Ints) -> tuple[Ints, Ints]:
        flow, link, lost, at = self._walk(source, target)
        if lost.size:
            raise self._lost(int(source[lost[0]]), int(target[lost[0]]), int(at[0]))
        return flow, link

    def _walk(self, source: Ints, target: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """All flows advance by one link at a time.

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
        row = self._row[node]
        behind = self._behind[row, self._table[row, self._column[target]]]
        return np.where(row >= 0, behind, self._cable[node])

    def _lost(self, source: int, target: int, at: int) -> HpctrainError:
        names, subnet = self.fabric.names, self.fabric.subnet
        if subnet[source] != subnet[target]:
            return HpctrainError(
                f"no cables lead from {names[source]} to {names[target]}: they are on separate subnets",
                "take hosts of one subnet at a time",
            )
        hint = "is a switch or a cable missing in the listing? discover the fabric again"
        if self.fabric.tables is not None:
            hint = (
                "tables and cables must be of one day, and every switch must have its table; "
                "without tables (no --routes) hpctrain assumes shortest paths"
            )
        return HpctrainError(self._explain(source, target, at), hint)

    def _explain(self, source: int, target: int, at: int) -> str:
        names = self.fabric.names
        return f"no route from {names[source]} to {names[target]}: it ends or goes round in circles at {names[at]}"

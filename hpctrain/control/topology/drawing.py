"""Draws a fabric: switches above hosts, cables coloured by load, and the ring as arcs below the hosts."""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from hpctrain.control.topology.fabric import Fabric, Floats
from hpctrain.control.topology.names import natural_key
from hpctrain.control.topology.rails import rail_adapters
from hpctrain.control.topology.routes import Routes
from hpctrain.control.topology.subtrees import subtrees_of
from hpctrain.control.topology.traffic import rail_rings

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fabric",
    "font.size": 8,
    # Names may contain dollar signs, which do not mark formulas.
    "text.parse_math": False,
}
_INK, _FILL, _IDLE = "#1f2933", {0: "#eef2f6", 1: "#dde7f0"}, "#b8c2cc"
_FILL_ABOVE = "#c9d8e6"
_INSIDE, _CROSSING = "#7fb3dd", "#0b4f8a"
# The scale begins at orange, because pale yellow is invisible on white.
_LOAD = LinearSegmentedColormap.from_list("load", ["#fdbb6b", "#f16913", "#b30000"])

# The most boxes in a row that are still readable.
_MOST_IN_A_ROW = 40
# Inches.
_ROW_GAP = 1.15
_NARROW = 0.9  # a place in a row where text is turned by 90 degrees
_MIN_WIDTH, _MAX_WIDTH, _PLACE = 8.0, 18.0, 0.42
_ARC_HEIGHT = 1.3
_LONGEST_NAME = 20
_OVERHEAD = 0.3
# A load of one flow per link is the optimum, so the scale extends to two and shows it as harmless.
_SCALE_END = 2.0
_ARC_ALPHA = 0.8


@dataclass(frozen=True, kw_only=True)
class Ring:
    """One order of hosts to draw.

    Attributes:
        title: what the picture says above it.
        hosts: numbers of the hosts; the last is followed by the first.
        load: of each directed link of the fabric (see :func:`ring_load`); None leaves the cables grey.
    """

    title: str
    hosts: Sequence[int]
    load: Floats | None = None


def ring_load(fabric: Fabric, hosts: Sequence[int]) -> Floats:
    """The flows on each directed link when each host sends to the next on every rail, in shares of an adapter's
    bandwidth: one flow on a link of half that bandwidth is 2.

    Raises:
        HpctrainError: two hosts have no route.
    """
    adapters = rail_adapters(fabric, hosts)
    routes = Routes(fabric)
    flows = sum((routes.loads(step.source, step.target) for step in rail_rings(adapters)), np.zeros(len(fabric.source)))
    fastest = fabric.bandwidth[np.isin(fabric.source, adapters)].max()
    shares: Floats = flows * fastest / fabric.bandwidth
    return shares


def draw(fabric: Fabric, rings: Sequence[Ring]) -> Figure:
    """Draw a panel for each ring, one above the other, with equal places and colours.

    Only switches above the rings' hosts, and those that their flows pass, are drawn. Of many hosts, those on the same
    leaves are one box; of many switches of a level, those above the same boxes. A bundle of parallel cables takes the
    colour of its busiest.
    """
    hosts = list(dict.fromkeys(host for ring in reversed(rings) for host in ring.hosts))
    sketch = _Sketch(fabric, hosts, _drawn_nodes(fabric, hosts, rings))
    loads = [float(ring.load.max(initial=0.0)) for ring in rings if ring.load is not None]
    scale = Normalize(1, max(_SCALE_END, *loads), clip=True) if loads else None
    with rc_context(_STYLE):
        figure = Figure(figsize=(sketch.width, (sketch.height + 0.4) * len(rings) + 0.7), layout="constrained")
        panels = figure.subplots(len(rings), squeeze=False)[:, 0]
        for axes, ring in zip(panels, rings, strict=True):
            _panel(axes, sketch, ring, _leaves(fabric, ring.hosts), scale)
        _legend(figure, list(panels), scale)
    return figure


def _drawn_nodes(fabric: Fabric, hosts: Sequence[int], rings: Sequence[Ring]) -> list[int]:
    """The hosts' adapters, every switch on an upward path from them, and the switches that the rings' flows pass."""
    drawn = np.isin(fabric.host, np.asarray(hosts, np.int32))
    for level in range(int(fabric.level.max())):
        upwards = drawn[fabric.source] & (fabric.level[fabric.source] == level) & (fabric.level[fabric.target] > level)
        drawn[fabric.target[upwards]] = True
    for ring in rings:
        if ring.load is not None:
            drawn[fabric.source[ring.load > 0]] = True
    nodes: list[int] = np.flatnonzero(drawn).tolist()
    return nodes


def _leaves(fabric: Fabric, hosts: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each host, its switch on each rail that the ring uses."""
    on = next(subtrees_of(fabric, rail_adapters(fabric, hosts)))
    return dict(zip(hosts, map(tuple, on.tolist()), strict=True))


def to_svg(figure: Figure) -> str:
    """The picture as SVG with text as text; the same figure gives the same bytes."""
    file = io.StringIO()
    with rc_context(_STYLE):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return file.getvalue()


def to_png(figure: Figure) -> bytes:
    """The picture as PNG."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()


@dataclass(kw_only=True)
class _Box:
    """Hosts, or switches of one level, that are drawn as one box: its text, and its centre and size in inches."""

    level: int
    names: list[str]
    text: str = ""
    turned: bool = False
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0

    def edge(self, side: int) -> tuple[float, float]:
        """The middle of the upper (1) or lower (-1) edge."""
        return self.x, self.y + side * self.height / 2


class _Sketch:
    """The boxes with their places, and the links between each two of them."""

    def __init__(self, fabric: Fabric, hosts: Sequence[int], nodes: Sequence[int]) -> None:
        self.boxes: list[_Box] = []
        self.box_of_host: dict[int, int] = {}
        self._box_of: dict[int, int] = {}
        below: dict[int, set[int]] = defaultdict(set)
        for source, target in zip(fabric.source.tolist(), fabric.target.tolist(), strict=True):
            if fabric.level[source] < fabric.level[target]:
                below[target].add(source)
        rows = [self._hosts(fabric, hosts, nodes)]
        for level in sorted({int(fabric.level[node]) for node in nodes} - {0}):
            switches = [node for node in nodes if fabric.level[node] == level]
            beneath = {node: frozenset(self._box_of[n] for n in below[node] if n in self._box_of) for node in switches}
            rows.append(self._switches(fabric, level, beneath))
        self.width = float(np.clip(_PLACE * max(map(len, rows)), _MIN_WIDTH, _MAX_WIDTH))
        self.bundles: dict[tuple[int, int], list[int]] = defaultdict(list)
        for link, (source, target) in enumerate(zip(fabric.source.tolist(), fabric.target.tolist(), strict=True)):
            if source in self._box_of and target in self._box_of:
                one, other = sorted((self._box_of[source], self._box_of[target]))
                self.bundles[one, other].append(link)
        top = 0.0
        for row in rows:
            top = self._place(row, top) + _ROW_GAP
        self.top = top - _ROW_GAP + _OVERHEAD
        self.height = self.top + _ARC_HEIGHT + 0.15

    def _hosts(self, fabric: Fabric, hosts: Sequence[int], nodes: Iterable[int]) -> list[int]:
        row = []
        for members in _groups(hosts, {host: fabric.leaves[host] for host in hosts}):
            row.append(self._add(0, [fabric.hosts[host] for host in members]))
            self.box_of_host |= dict.fromkeys(members, row[-1])
        self._box_of |= {
            node: self.box_of_host[int(fabric.host[node])]
            for node in nodes
            if int(fabric.host[node]) in self.box_of_host
        }
        return row

    def _switches(self, fabric: Fabric, level: int, beneath: Mapping[int, frozenset[int]]) -> list[int]:
        """The boxes of a level, each by the middle of the boxes below it."""
        middle = {node: float(np.mean([*boxes])) if boxes else 0.0 for node, boxes in beneath.items()}
        ordered = sorted(beneath, key=lambda node: (round(middle[node], 6), natural_key(fabric.names[node])))
        row = []
        for members in _groups(ordered, beneath):
            row.append(self._add(level, [fabric.names[node] for node in members]))
            self._box_of |= dict.fromkeys(members, row[-1])
        return row

    def _add(self, level: int, names: Iterable[str]) -> int:
        self.boxes.append(_Box(level=level, names=sorted(names, key=natural_key)))
        return len(self.boxes) - 1

    def _place(self, row: Sequence[int], y: float) -> float:
        """Place the boxes of a row whose lower edge is at ``y``; returns its upper edge."""
        place = self.width / len(row)
        boxes = [self.boxes[number] for number in row]
        for box in boxes:
            box.text = _label(box, lines=place >= _PLACE)
        lines = max(box.text.count("\n") + 1 for box in boxes)
        long = 0.075 * max(len(line) for box in boxes for line in box.text.split("\n")) + 0.14
        short = 0.14 * lines + 0.1
        for index, box in enumerate(boxes):
            box.turned = place < _NARROW
            box.height = long if box.turned else short
            box.width = min(short if box.turned else max(long, 0.6), 0.86 * place)
            box.x, box.y = (index + 0.5) * place, y + box.height / 2
        return y + boxes[0].height


def _groups(members: Sequence[int], likeness: Mapping[int, frozenset[int]]) -> list[list[int]]:
    """Single members if they fit in a row, else groups of those that are alike."""
    if len(members) <= _MOST_IN_A_ROW:
        return [[member] for member in members]
    alike: dict[frozenset[int], list[int]] = defaultdict(list)
    for member in members:
        alike[likeness[member]].append(member)
    return list(alike.values())


def _label(box: _Box, *, lines: bool) -> str:
    first, last = _short_name(box.names[0]), _short_name(box.names[-1])
    if len(box.names) == 1:
        return first
    if not lines:
        return f"{first} and {len(box.names) - 1} more"
    members = "hosts" if box.level == 0 else "leaves" if box.level == 1 else "switches"
    return f"{len(box.names)} {members}\n{first}\n… {last}"


def _short_name(name: str) -> str:
    """The name, or the two ends of a long one."""
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[:half]}…{name[-half:]}"


def _panel(
    axes: Axes, sketch: _Sketch, ring: Ring, leaves: Mapping[int, tuple[int, ...]], scale: Normalize | None
) -> None:
    axes.set_xlim(0, sketch.width)
    axes.set_ylim(-_ARC_HEIGHT - 0.1, sketch.top + 0.05)
    axes.set_axis_off()
    axes.set_title(ring.title, loc="left", fontsize=10, color=_INK)
    for (one, other), links in sketch.bundles.items():
        if one != other:
            busiest = float(ring.load[links].max()) if ring.load is not None else 0.0
            share = float(scale(busiest)) if scale and busiest else None
            axes.add_patch(_cable(sketch.boxes[one], sketch.boxes[other], len(links) // 2, share))
    for box in sketch.boxes:
        axes.add_patch(
            FancyBboxPatch(
                (box.x - box.width / 2, box.y - box.height / 2),
                box.width,
                box.height,
                boxstyle="round,pad=0,rounding_size=0.04",
                facecolor=_FILL.get(box.level, _FILL_ABOVE),
                edgecolor=_INK,
                linewidth=0.6,
                zorder=3,
            )
        )
        turn = 90 if box.turned else 0
        style: dict[str, Any] = {"fontsize": 7, "color": _INK, "rotation": turn, "zorder": 4}
        axes.text(box.x, box.y, box.text, ha="center", va="center", multialignment="center", **style)
    _arcs(axes, sketch, ring.hosts, leaves)


def _cable(lower: _Box, upper: _Box, cables: int, share: float | None) -> PathPatch:
    """The cables between two boxes, whose busiest has a share of the scale of loads; None for idle ones."""
    start, end = lower.edge(1), upper.edge(-1)
    path = Path([start, end])
    if lower.level == upper.level:
        # A cable between two boxes of one row is drawn as a curve above it.
        middle = (start[0] + end[0]) / 2, start[1] + 2 * _OVERHEAD
        path = Path([start, middle, upper.edge(1)], [Path.MOVETO, Path.CURVE3, Path.CURVE3])
    return PathPatch(
        path,
        fill=False,
        edgecolor=_IDLE if share is None else _LOAD(share),
        linewidth=0.7 + 0.5 * np.log2(max(cables, 1)),
        # Busier cables are drawn later, so that idle ones do not cover them.
        zorder=1 if share is None else 1.1 + share,
    )


def _arcs(axes: Axes, sketch: _Sketch, ring: Sequence[int], leaves: Mapping[int, tuple[int, ...]]) -> None:
    """An arc for each two boxes with ring neighbours in both, thicker for several pairs of neighbours."""
    box_of = sketch.box_of_host
    arcs: Counter[tuple[int, int, bool]] = Counter()
    for host, following in zip(ring, [*ring[1:], ring[0]], strict=True):
        arcs[box_of[host], box_of[following], leaves[host] != leaves[following]] += 1
    for (start, end, crossing), count in sorted(arcs.items()):
        if start == end:
            continue
        (left, y), (right, _) = sorted((sketch.boxes[start].edge(-1), sketch.boxes[end].edge(-1)))
        depth = _ARC_HEIGHT * (0.15 + 0.85 * (right - left) / sketch.width)
        path = Path(
            [(left, y), (left, y - depth * 4 / 3), (right, y - depth * 4 / 3), (right, y)],
            [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4],
        )
        axes.add_patch(
            PathPatch(
                path,
                fill=False,
                edgecolor=_CROSSING if crossing else _INSIDE,
                linewidth=0.9 + 0.5 * np.log2(count),
                alpha=_ARC_ALPHA,
                zorder=2,
            )
        )


def _legend(figure: Figure, panels: Sequence[Axes], scale: Normalize | None) -> None:
    figure.legend(
        handles=[
            Line2D([], [], color=_INSIDE, alpha=_ARC_ALPHA, label="ring neighbours on the same leaves"),
            Line2D([], [], color=_CROSSING, alpha=_ARC_ALPHA, label="ring neighbours on different leaves"),
            Line2D([], [], color=_IDLE, label="idle cable"),
        ],
        loc="outside lower left",
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    if scale:
        bar = figure.colorbar(
            ScalarMappable(scale, _LOAD), ax=list(panels), location="right", fraction=0.02, pad=0.01, aspect=30
        )
        bar.locator = MaxNLocator(integer=True)
        bar.set_label("flows on the busiest link of a cable or bundle")

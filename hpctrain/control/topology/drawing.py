"""Draws a fabric: switches above hosts, cables coloured by load, and the ring as arcs below the hosts."""

from __future__ import annotations

import io
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
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
from hpctrain.control.topology.folding import Bundle, DrawnBox, Folded, fold
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

# Inches.
_ROW_GAP = 1.15
_LINE = 0.14
_NARROW = 0.9  # a place in a row where text is turned by 90 degrees
_LINES = 0.4  # a place for three lines of it
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

    A fabric of many hosts is folded (:func:`hpctrain.control.topology.folding.fold`); only switches above the rings'
    hosts are drawn, the hosts as far as possible in the order of the last ring. A bundle of parallel cables takes the
    colour of its busiest.
    """
    hosts = list(dict.fromkeys(host for ring in reversed(rings) for host in ring.hosts))
    folded = fold(fabric, hosts, through=_on_the_way(fabric, rings))
    sketch = _Sketch(folded)
    loads = [float(ring.load.max(initial=0.0)) for ring in rings if ring.load is not None]
    scale = Normalize(1, max(_SCALE_END, *loads), clip=True) if loads else None
    with rc_context(_STYLE):
        figure = Figure(figsize=(sketch.width, (sketch.height + 0.4) * len(rings) + 0.7), layout="constrained")
        panels = figure.subplots(len(rings), squeeze=False)[:, 0]
        for axes, ring in zip(panels, rings, strict=True):
            _panel(axes, sketch, ring, _leaves(fabric, ring.hosts), scale)
        _legend(figure, list(panels), scale)
    return figure


def _on_the_way(fabric: Fabric, rings: Sequence[Ring]) -> list[int]:
    """The nodes that the rings' flows pass; without spines these include the leaves of other hosts."""
    busy = np.zeros(len(fabric.source), np.bool_)
    for ring in rings:
        busy |= ring.load > 0 if ring.load is not None else False
    nodes: list[int] = np.unique(fabric.source[busy]).tolist()
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


class _Sketch:
    """The position of each box, in inches."""

    def __init__(self, folded: Folded) -> None:
        self.folded = folded
        levels = sorted({box.level for box in folded.boxes})
        rows = [folded.row(level) for level in levels]
        self.width = float(np.clip(_PLACE * max(map(len, rows)), _MIN_WIDTH, _MAX_WIDTH))
        self.centre: dict[int, tuple[float, float]] = {}
        self.size: dict[int, tuple[float, float]] = {}
        self.text: dict[int, str] = {}
        self.turned: set[int] = set()
        # The lower and upper edge of each row, and the width of a place in it.
        self.rows: list[tuple[float, float, float]] = []
        y = 0.0
        for row in rows:
            names = _short_names([name for number in row for name in folded.boxes[number].names])
            place = self.width / len(row)
            turned = place < _NARROW
            texts = {number: _label(folded.boxes[number], names, lines=place >= _LINES) for number in row}
            lines = max(text.count("\n") + 1 for text in texts.values())
            longest = max(len(line) for text in texts.values() for line in text.split("\n"))
            long, short = 0.075 * longest + 0.14, _LINE * lines + 0.1
            height = long if turned else short
            for index, number in enumerate(row):
                self.centre[number] = ((index + 0.5) * place, y + height / 2)
                self.size[number] = (min(short if turned else max(long, 0.6), 0.86 * place), height)
            self.text |= texts
            self.turned |= set(row) if turned else set()
            self.rows.append((y, y + height, place))
            y += height + _ROW_GAP
        # Cables between switches of the top row are drawn above it.
        beside = any(
            bundle.lower != bundle.upper and {bundle.lower, bundle.upper} <= {*rows[-1]} for bundle in folded.bundles
        )
        self.top = y - _ROW_GAP + (_OVERHEAD if beside else 0)
        self.height = self.top + _ARC_HEIGHT + 0.15

    def edge(self, number: int, side: int) -> tuple[float, float]:
        """The middle of a box's upper (1) or lower (-1) edge."""
        x, y = self.centre[number]
        return x, y + side * self.size[number][1] / 2

    def between(self, start: tuple[float, float], end: tuple[float, float]) -> list[tuple[float, float]]:
        """The points at which a cable crosses the rows between its ends, in the gaps nearest to a straight line."""
        points = []
        for low, high, place in self.rows:
            if start[1] < low and high < end[1]:
                share = (low - start[1]) / (end[1] - start[1])
                gap = round((start[0] + share * (end[0] - start[0])) / place) * place
                points += [(gap, low), (gap, high)]
        return points


def _label(box: DrawnBox, names: Mapping[str, str], *, lines: bool) -> str:
    if len(box.names) == 1:
        return names[box.names[0]]
    if not lines:
        return f"{names[box.names[0]]} and {len(box.names) - 1} more"
    what = "hosts" if box.level == 0 else "leaves" if box.level == 1 else "switches"
    return f"{len(box.names)} {what}\n{names[box.names[0]]}\n… {names[box.names[-1]]}"


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """The names of a row; long names lose their common first words, and then their middles."""
    ends = zip(min(names), max(names), strict=False)
    start = "".join(one for one, other in itertools.takewhile(lambda pair: pair[0] == pair[1], ends))
    start = re.sub(r"[^\W_]*$", "", start) if max(map(len, names)) > _LONGEST_NAME else ""
    rests = {name: name[len(start) :] or name for name in names}
    half = _LONGEST_NAME // 2
    return {
        name: f"{rest[:half]}…{rest[-half:]}" if len(rest) > _LONGEST_NAME else rest for name, rest in rests.items()
    }


def _panel(
    axes: Axes, sketch: _Sketch, ring: Ring, leaves: Mapping[int, tuple[int, ...]], scale: Normalize | None
) -> None:
    axes.set_xlim(0, sketch.width)
    axes.set_ylim(-_ARC_HEIGHT - 0.1, sketch.top + 0.05)
    axes.set_axis_off()
    axes.set_title(ring.title, loc="left", fontsize=10, color=_INK)
    for bundle in sketch.folded.bundles:
        _cables(axes, sketch, bundle, ring.load, scale)
    for number, box in enumerate(sketch.folded.boxes):
        (x, y), (width, height) = sketch.centre[number], sketch.size[number]
        axes.add_patch(
            FancyBboxPatch(
                (x - width / 2, y - height / 2),
                width,
                height,
                boxstyle="round,pad=0,rounding_size=0.04",
                facecolor=_FILL.get(box.level, _FILL_ABOVE),
                edgecolor=_INK,
                linewidth=0.6,
                zorder=3,
            )
        )
        axes.text(
            x,
            y,
            sketch.text[number],
            ha="center",
            va="center",
            multialignment="center",
            fontsize=7,
            color=_INK,
            rotation=90 if number in sketch.turned else 0,
            zorder=4,
        )
    _arcs(axes, sketch, ring.hosts, leaves)


def _cables(axes: Axes, sketch: _Sketch, bundle: Bundle, load: Floats | None, scale: Normalize | None) -> None:
    if bundle.lower == bundle.upper:
        return
    busiest = float(load[bundle.links].max()) if load is not None else 0.0
    share = float(scale(busiest)) if scale and busiest else None
    colour = _IDLE if share is None else _LOAD(share)
    width = 0.7 + 0.5 * np.log2(max(bundle.cables, 1))
    start, end = sketch.edge(bundle.lower, 1), sketch.edge(bundle.upper, -1)
    path = Path([start, *sketch.between(start, end), end])
    if sketch.centre[bundle.lower][1] == sketch.centre[bundle.upper][1]:
        # A cable between two boxes of one row is drawn as a curve above it.
        middle = (start[0] + end[0]) / 2, start[1] + 2 * _OVERHEAD
        path = Path([start, middle, sketch.edge(bundle.upper, 1)], [Path.MOVETO, Path.CURVE3, Path.CURVE3])
    # Busier cables are drawn later, so that idle ones do not cover them.
    axes.add_patch(
        PathPatch(
            path, fill=False, edgecolor=colour, linewidth=width, zorder=1 + (0.1 + share if share is not None else 0)
        )
    )


def _arcs(axes: Axes, sketch: _Sketch, ring: Sequence[int], leaves: Mapping[int, tuple[int, ...]]) -> None:
    """An arc for each two boxes with ring neighbours in both, thicker for several pairs of neighbours."""
    box_of = sketch.folded.box_of_host
    arcs: Counter[tuple[int, int, bool]] = Counter()
    for host, following in zip(ring, [*ring[1:], ring[0]], strict=True):
        arcs[box_of[host], box_of[following], leaves[host] != leaves[following]] += 1
    for (start, end, crossing), count in sorted(arcs.items()):
        if start == end:
            continue
        (left, y), (right, _) = sorted((sketch.edge(start, -1), sketch.edge(end, -1)))
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

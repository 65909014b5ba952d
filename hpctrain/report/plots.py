"""The plots of a report: matplotlib figures as inline SVG with the colours of the page."""

from __future__ import annotations

import io
import re
from array import array
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from hpctrain.common.recipes.sections import Reported
from hpctrain.common.run.events.kinds import LogEvent, SlowRankEvent, StepEvent
from hpctrain.common.run.value_types import ratio
from hpctrain.report.record import Record, of_kind

FloatArray = NDArray[np.float64]
# The values of x and y, and how matplotlib draws them.
_Line = tuple[tuple[Any, Any], dict[str, Any]]

# matplotlib writes literal colours; these stand for the page's own, which differ between light and dark.
_INK, _LINE, _FIRST, _SECOND, _FAINT = "#010101", "#010102", "#010103", "#010104", "#010105"
_COLOURS = {
    _INK: "currentColor",
    _LINE: "var(--line)",
    _FIRST: "var(--first)",
    _SECOND: "var(--second)",
    _FAINT: "var(--faint)",
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
}
# A curve shows no more points, and fewer than the second number get a marker each.
_POINTS, _MARKED = 600, 30
# Of larger numbers neither sums nor the ends of an axis are finite.
_LARGEST = 1e290
_NAMED = {"color": _SECOND, "label": "slow rank named", "linestyle": "", "marker": "^"}
MOST_NAMES = 100
"""Of more values that a script logs, the first are drawn: each curve takes a tenth of a second."""


class Means:
    """The points of a curve, at most 600. Of more values each point is the mean of equally many, the last of what is
    left.
    """

    def __init__(self) -> None:
        self._x, self._y = array("d"), array("d")

    def __len__(self) -> int:
        return len(self._x)

    def add(self, x: float, y: float | None) -> None:
        """Add the next value. A point leaves out None and what cannot be drawn, and is a gap without other values."""
        self._x.append(x)
        # The comparison is not true of NaN either.
        self._y.append(y if y is not None and abs(y) < _LARGEST else np.nan)

    @property
    def known(self) -> bool:
        """Whether any point is not a gap."""
        return not np.isnan(self._y).all()

    @property
    def points(self) -> tuple[FloatArray, FloatArray]:
        """The values of x, and of y; NaN for a gap."""
        per_point = max(1, -(-len(self) // _POINTS))
        return _means(self._x, per_point), _means(self._y, per_point)


def _means(values: Sequence[float], count: int) -> FloatArray:
    """The means of so many values in a row, without those that are NaN; the last row may be shorter."""
    rows = np.pad(np.array(values), (0, -len(values) % count), constant_values=np.nan).reshape(-1, count)
    with np.errstate(invalid="ignore"):
        means: FloatArray = np.nansum(rows, axis=1) / np.isfinite(rows).sum(axis=1)
    return means


def curves(record: Record, reported: Reported | None) -> dict[str, str]:
    """The curves that the run's events allow over its steps, each as an SVG element under its caption.

    The ``reported`` result, which the recipe's source states, is drawn beside the same metric's curve.
    """
    sums = record.sums
    of_recipe = record.run is not None and record.run.epochs is not None
    logged = {} if of_recipe else {name: Means() for name in islice(sums.logged, MOST_NAMES)}
    loss, rate, speed = Means(), Means(), Means()
    slow = [event.iteration for event in of_kind(record.events, SlowRankEvent)]
    # At the steps after which slow ranks were named.
    named: list[_Line] = [((slow, [0] * len(slow)), _NAMED)] if slow else []
    for event in record:
        if isinstance(event, StepEvent):
            loss.add(event.iteration, event.loss)
            rate.add(event.iteration, event.learning_rate)
            if sums.is_timed(event):
                speed.add(event.iteration, ratio(event.samples, event.seconds) if of_recipe else event.seconds)
        elif isinstance(event, LogEvent):
            for name in event.values.keys() & logged.keys():
                logged[name].add(event.iteration, event.values[name])
    if not of_recipe:
        # Added last, because a script may log these names, too.
        series = logged | {"Learning rate": rate, "Seconds a step": speed}
        marks = {name: "." if len(means) < _MARKED else "" for name, means in series.items()}
        return {
            name: _picture(name, [(means.points, {"marker": marks[name]}), *(named if means is speed else [])])
            for name, means in series.items()
            if means.known
        }
    pictures = {}
    if len(loss):
        losses = [_faint(loss, "train, each step"), *_by_epoch(record, "train_loss", _FIRST, "train")]
        pictures["Loss"] = _picture("Loss", [*losses, *_by_epoch(record, "test_loss", _SECOND, "test")])
        pictures["Learning rate"] = _picture("Learning rate", [(rate.points, {})], bottom=0)
        title = "Throughput, samples/s"
        speeds = [_faint(speed, "each step"), *_by_epoch(record, "samples_per_s", _FIRST, "epoch"), *named]
        pictures[title] = _picture(title, speeds, bottom=0)
    if any(epoch.test_accuracy is not None for epoch in record.epochs):
        level = reported if reported and reported.metric == "test_accuracy" else None
        accuracy = _by_epoch(record, "test_accuracy", _FIRST, "this run" if level else "")
        pictures["Test accuracy"] = _picture("Test accuracy", accuracy, level=level)
    return pictures


def _faint(means: Means, label: str) -> _Line:
    return means.points, {"color": _FAINT, "label": label, "linewidth": 1}


def _by_epoch(record: Record, name: str, colour: str, label: str) -> list[_Line]:
    """A value of each epoch at the epoch's last step, where it was measured; nothing where it never was."""
    ends = record.sums.epoch_ends
    values = ((ends[epoch.epoch], getattr(epoch, name)) for epoch in record.epochs if epoch.epoch in ends)
    points = [(step, number) for step, number in values if number is not None]
    x, y = zip(*points, strict=True) if points else ((), ())
    return [((x, y), {"color": colour, "label": label, "marker": "."})] if points else []


def _picture(title: str, lines: Sequence[_Line], *, bottom: float | None = None, level: Reported | None = None) -> str:
    with rc_context({**_STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(4.5, 2.5), layout="constrained")
        axes = figure.add_subplot()
        for points, style in lines:
            axes.plot(*points, **{"color": _FIRST, "linewidth": 1.6, **style})
        if level:
            label = f"reported: {level.value:g}" + (", of other values" if level.of_other_values else "")
            axes.axhline(level.value, color=_SECOND, linestyle="--", linewidth=1.2, label=label)
        if any(style.get("label") for _, style in lines):
            axes.legend()
        axes.set_ylim(bottom=bottom)
        axes.set_xlabel("step")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        file = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    for literal, colour in _COLOURS.items():
        svg = svg.replace(literal, colour)
    # Names must be unique on a page with several pictures, and nothing refers to those of groups.
    return re.sub(r'<g id="[\w.]+_\d+">', "<g>", svg)

"""The plots of a report: matplotlib figures as inline SVG with the colours of the page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from hpctrain.recipes.schema import Reported
from hpctrain.report.record import Record
from hpctrain.run.events.kinds import EpochEvent, Moment, StepEvent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FloatArray = NDArray[np.float64]

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
    "lines.linewidth": 1.6,
    "legend.frameon": False,
}
# More points than this a curve cannot show: it is averaged down to them.
_POINTS = 600
# So few are marked each.
_MARKED = 30


def curves(record: Record, reported: Reported | None) -> dict[str, str]:
    """The curves that the run's events allow, each as an SVG element under its caption.

    Args:
        record: the run's events.
        reported: the result that the recipe's source states, drawn beside the same metric's curve.
    """
    if not record.by_epoch:
        return _by_step_alone(record)
    pictures: dict[str, str] = {}
    if record.steps:
        pictures["Loss"] = _picture("loss", lambda axes: _loss(axes, record))
    if any(epoch.test_accuracy is not None for epoch in record.epochs):
        pictures["Test accuracy"] = _picture("accuracy", lambda axes: _accuracy(axes, record, reported))
    if record.steps:
        pictures["Learning rate"] = _picture("rate", lambda axes: _learning_rate(axes, record))
        pictures["Throughput, samples/s"] = _picture("throughput", lambda axes: _throughput(axes, record))
    return pictures


def _by_step_alone(record: Record) -> dict[str, str]:
    """The curves of a script: its logged values by name, and the known values of its steps."""
    series: dict[str, list[tuple[int, float | None]]] = {
        name: [(event.iteration, event.values[name]) for event in record.logs if name in event.values]
        for name in record.logged
    }
    series["Learning rate"] = [(step.iteration, step.learning_rate) for step in record.steps]
    series["Seconds a step"] = [(step.iteration, step.seconds) for step in record.timed_steps]
    return {
        name: _picture("script", partial(_points, points=points))
        for name, points in series.items()
        if any(value is not None for _, value in points)
    }


def overlap(timeline: Sequence[Moment]) -> str:
    """One step's communication over time as an SVG element: a row per bucket, with gradients as ticks and reductions as
    bars.
    """
    buckets = sorted({bucket for _, _, bucket in timeline})
    height = 0.9 + 0.3 * min(len(buckets), 20)
    # Not wider: its text is to be readable on a telephone too.
    return _picture("overlap", lambda axes: _overlap(axes, timeline), width=6.2, height=height)


def _picture(name: str, draw: Callable[[Axes], None], *, width: float = 4.5, height: float = 2.5) -> str:
    with rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.add_subplot())
        file = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    for literal, colour in _COLOURS.items():
        svg = svg.replace(literal, colour)
    # Nothing refers to the groups' names, and several pictures share one page, where a name must be unique.
    return re.sub(r'<g id="[\w.]+_\d+">', "<g>", svg)


def _loss(axes: Axes, record: Record) -> None:
    x, y = _by_step(record, record.steps, lambda step: step.loss)
    axes.plot(x, y, color=_FAINT, linewidth=1, label="train, each step")
    _by_epoch(axes, record, lambda epoch: epoch.train_loss, color=_FIRST, label="train")
    _by_epoch(axes, record, lambda epoch: epoch.test_loss, color=_SECOND, label="test")
    axes.legend()
    _finish(axes)


def _accuracy(axes: Axes, record: Record, reported: Reported | None) -> None:
    _by_epoch(axes, record, lambda epoch: epoch.test_accuracy, color=_FIRST, label="this run")
    if reported and reported.metric == "test_accuracy":
        label = f"reported: {reported.value:g}" + (", of other values" if reported.of_other_values else "")
        axes.axhline(reported.value, color=_SECOND, linestyle="--", linewidth=1.2, label=label)
        axes.legend()
    _finish(axes)


def _learning_rate(axes: Axes, record: Record) -> None:
    x, y = _by_step(record, record.steps, lambda step: step.learning_rate)
    axes.plot(x, y, color=_FIRST)
    axes.set_ylim(bottom=0)
    _finish(axes)


def _throughput(axes: Axes, record: Record) -> None:
    x, y = _by_step(record, record.timed_steps, _samples_per_s)
    axes.plot(x, y, color=_FAINT, linewidth=1, label="each step")
    _by_epoch(axes, record, lambda epoch: epoch.samples_per_s, color=_FIRST, label="epoch")
    axes.set_ylim(bottom=0)
    axes.legend()
    _finish(axes)


def _points(axes: Axes, points: Sequence[tuple[int, float | None]]) -> None:
    x, y = (np.array(values, float) for values in zip(*points, strict=True))
    parts = min(len(points), _POINTS)
    axes.plot(_means(x, parts), _means(y, parts), color=_FIRST, marker="." if parts < _MARKED else "")
    _finish(axes, "step")


def _finish(axes: Axes, x: str = "epoch") -> None:
    axes.set_xlabel(x)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _samples_per_s(step: StepEvent) -> float | None:
    return None if step.samples is None or not step.seconds else step.samples / step.seconds


def _by_epoch(
    axes: Axes, record: Record, value: Callable[[EpochEvent], float | None], *, color: str, label: str
) -> None:
    """Draw a value of each epoch at the epoch's end, where it was measured."""
    values = ((epoch.epoch, value(epoch)) for epoch in record.epochs)
    if points := [(epoch, each) for epoch, each in values if each is not None]:
        axes.plot(*zip(*points, strict=True), color=color, marker=".", label=label)


def _by_step(
    record: Record, steps: Sequence[StepEvent], value: Callable[[StepEvent], float | None]
) -> tuple[FloatArray, FloatArray]:
    """A value of each step over the epochs done with it, averaged down to what a picture can show."""
    x = epochs_done(record, steps)
    y = np.array([value(step) for step in steps], float)
    parts = min(len(steps), _POINTS)
    return _means(x, parts), _means(y, parts)


def epochs_done(record: Record, steps: Sequence[StepEvent]) -> FloatArray:
    """The number of epochs done after each step. Where ranks died and batches became smaller, an epoch has more steps.

    The record is of a recipe's run: see :attr:`Record.by_epoch`.
    """
    assert record.run and record.run.iterations_per_epoch is not None
    per_epoch = record.run.iterations_per_epoch
    ends = {_epoch(step): step.iteration for step in record.steps}
    begins = {epoch: ends.get(epoch - 1, (epoch - 1) * per_epoch) for epoch in ends}
    lengths = {epoch: max(1, ends[epoch] - begins[epoch]) for epoch in ends}
    # It may still go on.
    lengths[max(ends)] = max(lengths[max(ends)], per_epoch)
    return np.array([(e := _epoch(step)) - 1 + (step.iteration - begins[e]) / lengths[e] for step in steps])


def _epoch(step: StepEvent) -> int:
    assert step.epoch is not None
    return step.epoch


def _means(values: FloatArray, parts: int) -> FloatArray:
    """The mean of each part's finite values; NaN, drawn as a gap, if there is none."""
    finite = (part[np.isfinite(part)] for part in np.array_split(values, parts))
    return np.array([part.mean() if len(part) else np.nan for part in finite])


def _overlap(axes: Axes, timeline: Sequence[Moment]) -> None:
    times: dict[str, list[tuple[int, float]]] = {"gradient": [], "launched": [], "finished": []}
    for seconds, what, bucket in timeline:
        times[what].append((bucket, seconds * 1e3))
    launched, finished = dict(times["launched"]), dict(times["finished"])
    buckets = sorted(launched.keys() & finished.keys())
    axes.barh(
        buckets,
        [finished[bucket] - launched[bucket] for bucket in buckets],
        left=[launched[bucket] for bucket in buckets],
        height=0.5,
        color=_FIRST,
        label="reduction in flight",
    )
    axes.plot(
        [milliseconds for _, milliseconds in times["gradient"]],
        # Above the bars, which begin where the bucket's last gradient is ready and would cover it.
        [bucket - 0.38 for bucket, _ in times["gradient"]],
        linestyle="",
        marker="|",
        markersize=6,
        color=_SECOND,
        label="gradient ready",
    )
    if times["gradient"]:
        last = max(milliseconds for _, milliseconds in times["gradient"])
        axes.axvline(last, color=_SECOND, linestyle="--", linewidth=1, label="last gradient of the step")
    axes.set_yticks(sorted({bucket for _, _, bucket in timeline}))
    axes.invert_yaxis()
    axes.set_ylabel("bucket")
    axes.set_xlabel("milliseconds")
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)

"""A run's measured figures beside its prediction, and the likely causes where it took longer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hpctrain.common.run.events.kinds import CheckpointEvent, RecoveredFaultEvent, RunEvent
from hpctrain.common.run.plan import Plan
from hpctrain.report.energy import energy_of, kwh
from hpctrain.report.faults import stall_line
from hpctrain.report.predicted import PredictedRow, Range
from hpctrain.report.record import Record, of_kind

# The share of the excess that a cause has to explain to be named as the likely one.
_MOSTLY = 0.5
INSIDE = "inside"
_SLOWER = "slower than predicted"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure; None for what was not measured.

    Attributes:
        name: the figure's key in ``summary.json``; ``title`` is what people read.
        below, above: the verdict on a measured value on either side of the range; None where that says nothing.
        text: formats a value.
        remark: what the measured value covers.
    """

    name: str
    title: str
    measured: float | None
    predicted: Range
    below: str | None
    above: str | None
    text: Callable[[float], str]
    remark: str = ""

    @property
    def verdict(self) -> str | None:
        """``inside``, or in what way it is not; None where nothing can be said."""
        if self.measured is None:
            return None
        if self.measured < self.predicted.low:
            return self.below
        return self.above if self.measured > self.predicted.high else INSIDE

    @property
    def excess(self) -> float:
        """How much more was measured than predicted; 0 within the range and below."""
        over = self.measured is not None and self.measured > self.predicted.high
        return self.measured - self.predicted.value if over and self.measured is not None else 0.0

    @property
    def row(self) -> tuple[str, str, str, str]:
        """Its title, the measured value, the predicted one with its range, and the verdict."""
        low, value, high = map(self.text, (self.predicted.low, self.predicted.value, self.predicted.high))
        measured = "—" if self.measured is None else self.text(self.measured)
        return self.title, measured, f"{value} [{low}, {high}]", "; ".join(filter(None, (self.verdict, self.remark)))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run beside its prediction.

    Attributes:
        causes: the likely causes where the run is slower, each with what to do next.
        note: why nothing can be compared; empty otherwise.
    """

    figures: tuple[Figure, ...]
    causes: tuple[str, ...] = ()
    note: str = ""

    @property
    def outside(self) -> list[str]:
        """The names of the figures that were measured outside of their range."""
        return [figure.name for figure in self.figures if figure.verdict not in (None, INSIDE)]

    @property
    def lines(self) -> list[str]:
        """The comparison as lines for a terminal."""
        if self.note:
            return [self.note]
        rows = [figure.row for figure in self.figures if figure.measured is not None]
        if not rows:
            return []
        cells = [("", "measured", "predicted", ""), *rows]
        widths = [max(len(row[column]) for row in cells) for column in range(3)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)) for row in cells]
        return [*(line.rstrip() for line in table), *self.causes]


def compare(record: Record, plan: Plan, predicted: PredictedRow) -> Comparison:
    """A run, finished or not, beside its prediction."""
    if note := _incomparable(record, plan, predicted):
        return Comparison(figures=(), note=note)
    figures = tuple(_figures(record, plan, predicted))
    by_name = {figure.name: figure for figure in figures}
    return Comparison(figures=figures, causes=tuple(_causes(record, by_name, predicted.nodes)))


def comparison_keys(comparison: Comparison | None) -> dict[str, Any]:
    """The keys of ``summary.json``: each predicted figure with its range and measured value, and the names of those
    outside.
    """
    if comparison is None or comparison.note:
        return {"predicted": None, "outside": None}
    return {
        "predicted": {
            figure.name: figure.predicted.model_dump()
            | ({} if figure.measured is None else {"measured": figure.measured})
            for figure in comparison.figures
        },
        "outside": comparison.outside,
    }


def _incomparable(record: Record, plan: Plan, predicted: PredictedRow) -> str:
    if plan.start.share_gpus:
        return "not compared with its prediction, which is for ranks with a GPU each: the ranks shared GPUs"
    ranks = {run.ranks for run in of_kind(record.events, RunEvent)}
    ranks |= {fault.ranks for fault in of_kind(record.events, RecoveredFaultEvent)}
    if ranks <= {predicted.gpus}:
        return ""
    had = " and ".join(map(str, sorted(ranks)))
    return f"not compared with its prediction, which is for {predicted.gpus} ranks: the run had {had}"


def _figures(record: Record, plan: Plan, predicted: PredictedRow) -> Iterator[Figure]:
    timed = record.sums.timed
    # The time and energy of the whole run are measured only once it is done.
    end = record.end if record.end and record.end.status == "done" else None
    energy = energy_of(record.events, plan) if end else None
    measured = {
        "step_s": statistics.median(record.sums.durations) if record.sums.durations else None,
        "samples_per_s": timed.samples_per_s,
        "communication_share": timed.communication_share,
        "minutes": end.seconds / 60 if end and end.seconds is not None else None,
        "kwh": kwh(energy.total) if energy else None,
    }
    for name, (title, below, above, text) in _FIGURES.items():
        if (interval := getattr(predicted, name)) is not None:
            covers = name == "kwh" and energy and energy.total
            yield Figure(
                name=name,
                title=title,
                measured=measured[name],
                predicted=interval,
                below=below,
                above=above,
                text=text,
                remark=f"measured of {energy.covers}; predicted of whole nodes" if covers and energy else "",
            )


def _causes(record: Record, figures: dict[str, Figure], nodes: int) -> list[str]:
    """The likely causes of a slower run, from its own events; empty for one that is not slower."""
    found = [*_stragglers(record), *_reductions(figures["communication_share"], nodes)]
    step = figures["step_s"]
    if step.excess:
        found += _input(record, step)
        found = found or [
            "likely cause: neither samples nor reductions were waited for, so the computation itself is slower; next: "
            "hpctrain doctor, and hpctrain bench step --sweep --json, which calibrates the prediction"
        ]
    elif figures.get("minutes") and figures["minutes"].excess:
        found += _between_steps(record, 60 * figures["minutes"].excess)
    slower = any(figure.verdict == _SLOWER for figure in figures.values())
    return found if slower or figures["communication_share"].excess else []


def _stragglers(record: Record) -> list[str]:
    stalls = [stall for attempt in record.attempts for stall in attempt.stalls]
    if not stalls:
        return []
    worst = max(stalls, key=lambda stall: stall.seconds)
    return [f"likely cause: {stall_line(worst)}; next: hpctrain status, hpctrain doctor"]


def _reductions(share: Figure, nodes: int) -> list[str]:
    if not share.excess or share.measured is None:
        return []
    # Waiting for a slow rank also counts as communication, because the others wait in a reduction.
    where, look = ("the fabric, or", "topology verify") if nodes > 1 else ("shared cores, or", "doctor")
    return [
        f"likely cause: reductions are {_percent(share.measured)} of a step, predicted at most "
        f"{_percent(share.predicted.high)}: {where} ranks that are not equally fast; next: hpctrain {look}, "
        "hpctrain bench allreduce"
    ]


def _input(record: Record, step: Figure) -> list[str]:
    share = record.sums.timed.data_share
    if share is None or step.measured is None or share * step.measured < _MOSTLY * step.excess:
        return []
    return [
        f"likely cause: {_percent(share)} of a step is waiting for samples, which is most of the excess; next: "
        "hpctrain bench loader"
    ]


def _between_steps(record: Record, excess: float) -> list[str]:
    """The cause where the steps are as predicted, but the run took ``excess`` seconds longer."""
    blocked = sum(event.blocked_seconds or 0.0 for event in of_kind(record.events, CheckpointEvent))
    if blocked >= _MOSTLY * excess:
        return [
            f"likely cause: checkpoints held the training up for {_duration(blocked)}; next: hpctrain bench checkpoint"
        ]
    again = f", and it was begun {len(record.attempts)} times" if len(record.attempts) > 1 else ""
    return [
        f"likely cause: the steps are as predicted, so the time was lost between them{again}; next: hpctrain status"
    ]


def _duration(seconds: float) -> str:
    for least, size, unit in ((5400.0, 3600.0, "h"), (90.0, 60.0, "min"), (1.0, 1.0, "s")):
        if seconds >= least:
            return f"{_number(seconds / size)} {unit}"
    return f"{_number(seconds * 1e3)} ms"


def _percent(share: float) -> str:
    return f"{_number(100 * share)} %"


def _number(value: float) -> str:
    """Three digits, without an exponent for large ones."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_FIGURES: dict[str, tuple[str, str | None, str, Callable[[float], str]]] = {
    "step_s": ("step (median)", "faster", _SLOWER, _duration),
    "samples_per_s": ("samples/s", _SLOWER, "faster", _number),
    "communication_share": ("communication", "less than predicted", "more than predicted", _percent),
    "minutes": ("time", "faster", _SLOWER, lambda minutes: _duration(60 * minutes)),
    # The prediction is of whole nodes, and no counter sees all that one draws.
    "kwh": ("energy, kWh", None, "more than predicted", _number),
}
"""By key of ``summary.json`` and of a prediction: the title, the verdicts below and above the range, and the form."""

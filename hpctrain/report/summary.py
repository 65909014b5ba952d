"""The figures of a run: its energy, its result beside the one that its source reports, and ``summary.json``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.common.files.printable import shortened
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.sections import Reported
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event, attempts
from hpctrain.common.run.events.kinds import EnergyEvent, EpochEvent, RunEvent
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.value_types import EnergySource, HostEnergy
from hpctrain.report.record import Record, of_kind

_JOULES = 3.6e6
_SOURCES: dict[EnergySource, str] = {"gpu": "GPUs", "cpu": "CPUs", "dram": "DRAM"}


def energy_keys(events: Sequence[Event], plan: Plan, samples: int | None) -> dict[str, Any]:
    """The keys of ``summary.json`` about energy; those of a run without a reading, or without a counter, are None.

    Args:
        events: those of all attempts, whose energy is added up: a step that was lost and done again was paid for twice.
        samples: of the steps that count up to the last reading.
    """
    readings = of_kind(events, EnergyEvent)
    # A reading of a meter, which its host and its begin identify, includes those before it.
    meters = {(host, reading.began): reading for event in readings for host, reading in event.hosts.items()}
    joules: dict[EnergySource, float] = {}
    for reading in meters.values():
        for source, drawn in reading.joules.items():
            joules[source] = joules.get(source, 0.0) + drawn
    # The sources do not overlap.
    total = sum(joules.values()) if joules else None
    return {
        "energy_kwh": kwh(total),
        "energy_by_source": {source: kwh(joules.get(source)) for source in _SOURCES} if joules else None,
        "joules_per_sample": total / samples if total is not None and samples else None,
        "energy_covers": _covers(meters, events, plan) if readings else None,
    }


def kwh(joules: float | None) -> float | None:
    """Joules in kWh; None for None."""
    return None if joules is None else joules / _JOULES


def energy_text(amount: float) -> str:
    """An amount in kWh with a unit that suits it."""
    if amount >= 1:
        return f"{amount:,.2f} kWh"
    return f"{amount * 1e3:.2f} Wh" if amount >= 1e-2 else f"{amount * _JOULES:,.0f} J"


def _covers(meters: Mapping[tuple[str, float], HostEnergy], events: Sequence[Event], plan: Plan) -> str:
    missing = shortened("; ".join(dict.fromkeys(text for reading in meters.values() for text in reading.missing)))
    if not any(reading.joules for reading in meters.values()):
        return f"nothing here can be read: {missing or 'there is no counter'}"
    named = {host for run in of_kind(events, RunEvent) for host in run.hosts or ()}
    count = max(len(named) or len(plan.hosts) or 1, len({host for host, _ in meters}))
    parts = []
    for source, title in _SOURCES.items():
        hosts = {host for (host, _), reading in meters.items() if source in reading.joules}
        whole = f"{len(hosts)} of {count} host{'s' if count > 1 else ''}"
        parts.append(f"{title} of {whole}" if hosts else f"no {title}")
    begun = attempts(events)
    measured = sum(any(isinstance(event, EnergyEvent) for event in part) for part in begun)
    if measured < len(begun):
        parts.append(f"{measured} of {len(begun)} attempts")
    return ", ".join(parts) + (f" ({missing})" if missing else "")


MEDIAN = "test_accuracy_median"


def median_accuracy(epochs: Sequence[EpochEvent], count: int) -> float | None:
    """The median test accuracy of the last ``count`` epochs, or of all if there are fewer.

    None without an epoch, and where one of them has no finite accuracy.
    """
    values = [epoch.test_accuracy for epoch in epochs[-count:]]
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(known) if values and len(known) == len(values) else None


def result_name(recipe: Recipe) -> str:
    """The metric in a run's summary that is the recipe's result. ``recipe`` is that of a plan, as below."""
    rows = [*filter(None, [recipe.reported_at(recipe.global_batch)]), *recipe.reported]
    metric = rows[0].metric if rows else "test_loss" if recipe.data.name == "text" else "test_accuracy"
    return MEDIAN if metric == "test_accuracy" and recipe.median_of > 1 else metric


def result_title(recipe: Recipe) -> str:
    """The name of the result for people."""
    name, count = result_name(recipe), min(recipe.median_of, recipe.epochs)
    if name != MEDIAN:
        return name.replace("_", " ")
    return "test accuracy" + (f", median of the last {count} epochs" if count > 1 else " of the one epoch")


def reported_text(recipe: Recipe) -> str:
    """The source's result for the recipe's batch, or a note that there is none for it or that this is a smoke run."""
    if recipe.smoke:
        return "a smoke run, which is not compared with what the source reports"
    if rows := reported_rows(recipe):
        return f"reported: {'; '.join(map(row_text, rows))}"
    if not recipe.reported:
        return "nothing reported to compare with"
    batches = sorted({row.batch for row in recipe.reported if row.batch is not None})
    return f"nothing reported for batch {recipe.global_batch}, only for {', '.join(map(str, batches))}"


def reported_rows(recipe: Recipe) -> list[Reported]:
    """The source's rows about the recipe's result: those for its exact batch if any, else the general ones."""
    best = recipe.reported_at(recipe.global_batch)
    return [row for row in recipe.reported if best and (row.batch, row.metric) == (best.batch, best.metric)]


def row_text(row: Reported) -> str:
    """A reported row as ``0.7626 ± 0.0009 (of other values; remark)``."""
    deviation = "" if row.deviation is None else f" ± {row.deviation:g}"
    remarks = [text for text in ("of other values" if row.of_other_values else "", row.remark) if text]
    return f"{row.value:g}{deviation}" + (f" ({'; '.join(remarks)})" if remarks else "")


def summarise(directory: RunDirectory, plan: Plan, status: str) -> dict[str, Any]:
    """The summary of a run from its plan and its events.

    What the run did not record is None. Throughput and shares are over all steps but the first of each attempt, which
    also compiles and allocates. ``gathered_bytes`` are the rows of whole batches that a rank gathered. ``metrics`` are
    those of the last epoch, and the median of several where that is the recipe's result; for a script the last value of
    each name that it logged. ``survived`` are the faults that the run recovered from, each with its attempt, whose
    numbering of ranks it uses. Energy is of all attempts, a sample counted once however often it was trained on.
    """
    return summarise_record(Record(directory), plan, status)


def summarise_record(record: Record, plan: Plan, status: str) -> dict[str, Any]:
    """:func:`summarise` for events that were read before."""
    asked = plan.backend if plan.capabilities else None
    run = record.run
    totals, timed = record.sums.totals, record.sums.timed
    speeds = run.speeds(timed.samples_per_s) if run else {}
    return {
        "status": status,
        "recipe": plan.recipe.name if plan.recipe else None,
        "script": str(plan.script.path) if plan.script else None,
        "framework": run.framework if run else plan.framework,
        "backend": run.backend if run else asked,
        "ranks": plan.ranks,
        "shared_gpus": plan.start.share_gpus,
        "epochs": len(record.epochs) if run and run.epochs is not None else None,
        "steps": totals.count if run else None,
        "samples_per_s": timed.samples_per_s,
        **speeds,
        "communication_share": timed.communication_share,
        "gathered_bytes": totals.gathered_bytes,
        "data_share": timed.data_share,
        "seconds": record.end.seconds if record.end else None,
        "survived": [
            {"attempt": attempt} | {key: value for key, value in fault.record().items() if key not in ("time", "event")}
            for attempt, fault in record.survived
        ],
        **energy_keys(record.events, plan, record.sums.metered.samples),
        "metrics": record.sums.logged if plan.script else _metrics(record.epochs, plan),
    }


def _metrics(epochs: Sequence[EpochEvent], plan: Plan) -> dict[str, float | None]:
    if not epochs:
        return {}
    last = epochs[-1].metrics
    if plan.recipe is None or plan.recipe.median_of == 1:
        return last
    return {**last, MEDIAN: median_accuracy(epochs, plan.recipe.median_of)}

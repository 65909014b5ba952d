"""The summary of a run: the few figures in ``summary.json`` for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events.kinds import EpochEvent
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.value_types import Count, Number, Outcome, Seconds, Text
from hpctrain.report.record import Record
from hpctrain.report.results import MEDIAN, median_accuracy
from hpctrain.report.run_energy import energy_keys, energy_of


class Summary(BaseModel):
    """The keys of ``summary.json`` that the report reads."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    status: Outcome
    framework: str | None = None
    backend: str | None = None
    shared_gpus: bool = False
    seconds: Seconds | None = None
    epochs: Count | None
    steps: Count | None
    samples_per_s: Number
    communication_share: Number
    gathered_bytes: Count | None = None
    data_share: Number = None
    energy_kwh: Number = None
    joules_per_sample: Number = None
    energy_covers: Text | None = None
    metrics: dict[str, Number]


def summarise(directory: RunDirectory, plan: Plan, status: str) -> dict[str, Any]:
    """The summary of a run from its plan and its events.

    Args:
        directory: may hold no events, for a script.
        status: one of ``done``, ``failed`` or ``resumable``.

    Returns:
        The keys of ``summary.json``. What the run did not record is None, ``metrics`` is then empty. Throughput and
        shares are over all steps but the first of each attempt, which also compiles and allocates; of text there are
        ``tokens_per_s`` and, where the GPUs' peak is known, ``flops_utilisation``. ``gathered_bytes`` are the
        rows of whole batches that were gathered on one rank. With ``shared_gpus``, ranks shared GPUs and no speed means
        anything. ``metrics`` are those of the last epoch, and the median of several where that is the recipe's result;
        for a script the last value of each name that it logged.
        ``survived`` are the faults that the run recovered from, each with its attempt, whose numbering of ranks it
        uses. The keys about energy are those of :mod:`hpctrain.report.run_energy`: kWh and joules of all attempts, a
        sample counted once however often it was trained on.
    """
    return summarise_record(Record.read(directory), plan, status)


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
        **energy_keys(energy_of(record.events, plan), record.sums.metered.samples),
        "metrics": record.sums.logged if plan.script else _metrics(record.epochs, plan),
    }


def _metrics(epochs: Sequence[EpochEvent], plan: Plan) -> dict[str, float | None]:
    if not epochs:
        return {}
    last = epochs[-1].metrics
    if plan.recipe is None or plan.recipe.median_of == 1:
        return last
    return {**last, MEDIAN: median_accuracy(epochs, plan.recipe.median_of)}

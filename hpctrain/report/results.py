"""The result of a run as its source measures it, beside the result that the source reports."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.sections import Reported
from hpctrain.common.run.events.kinds import EpochEvent

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

"""Medians of results, and what stands beside them from the source."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from hpctrain.common.recipes.schema import Recipe
from hpctrain.report.summary import MEDIAN, median_accuracy, reported_text, result_name, result_title, summarise
from support.golden import check_text
from support.report.written_runs import Line, digits, recipe_plan, run_events, typed, write_run

GOYAL = ({"value": 0.7640, "deviation": 0.0012, "batch": 256}, {"value": 0.7626, "deviation": 0.0009, "batch": 8192})
# The fourth of five is the median.
ACCURACIES = (0.1, 0.71, 0.75, 0.72, 0.74, 0.73)


def recipe(rows: tuple[dict[str, object], ...] = GOYAL, *, size: int = 64, median_of: int = 5) -> Recipe:
    values = digits().model_dump(mode="json")
    values["reported"] = [{"metric": "test_accuracy", **row} for row in rows]
    values["batch"]["size"] = size
    return Recipe.model_validate_json(json.dumps({**values, "median_of": median_of}))


def epochs(accuracies: tuple[float, ...]) -> list[Line]:
    whole = next(event for event in run_events() if event["event"] == "epoch")
    return [{**whole, "epoch": n, "test_accuracy": value} for n, value in enumerate(accuracies, start=1)]


@pytest.mark.parametrize("count", [1, 2, 4, 5, 6, 9])
def test_median_is_of_the_last_epochs(count: int) -> None:
    assert median_accuracy([*map(typed, epochs(ACCURACIES))], count) == statistics.median(ACCURACIES[-count:])


@pytest.mark.parametrize("accuracies", [(), (0.5, float("nan"), 0.6)])
def test_there_is_no_median_of_what_is_not_finite(accuracies: tuple[float, ...]) -> None:
    assert median_accuracy([*map(typed, epochs(accuracies))], 3) is None


def test_summary_has_the_median_where_it_is_the_result(tmp_path: Path) -> None:
    events = [*run_events()[:1], *epochs(ACCURACIES)]
    directory = write_run(tmp_path / "run", recipe_plan(recipe=recipe()), events)
    metrics = summarise(directory, recipe_plan(recipe=recipe()), "done")["metrics"]
    assert (metrics["test_accuracy"], metrics[MEDIAN]) == (0.73, 0.73)
    metrics = summarise(directory, recipe_plan(recipe=recipe(median_of=4)), "done")["metrics"]
    assert metrics[MEDIAN] == pytest.approx(0.735)
    assert MEDIAN not in summarise(directory, recipe_plan(recipe=recipe(median_of=1)), "done")["metrics"]


def test_the_title_counts_the_epochs_that_there_are() -> None:
    shorter = [recipe().model_copy(update={"epochs": count}) for count in (2, 1)]
    check_text("result-titles", "\n".join(map(result_title, (recipe(), *shorter))))


def test_source_is_asked_for_the_batch_of_the_run() -> None:
    of_any = ({"value": 0.7, "remark": "of any batch"}, *GOYAL)
    twice = ({"value": 0.735, "batch": 64, "remark": "minimal"}, {"value": 0.752, "batch": 64, "remark": "extended"})
    asked = (recipe(size=8192), recipe(size=64), recipe(of_any, size=64), recipe(of_any, size=256), recipe(twice))
    check_text("reported", "\n".join(map(reported_text, asked)))
    assert result_name(recipe(median_of=1)) == "test_accuracy"
    assert result_name(recipe(({"metric": "test_loss", "value": 1.0},), median_of=5)) == "test_loss"

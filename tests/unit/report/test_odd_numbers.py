"""What a reader is shown of odd numbers, damaged checkpoints and changed settings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.report.page import render
from hpctrain.report.plots import Means
from hpctrain.report.record import Record, event_line
from hpctrain.report.summary import summarise_record
from support.golden import check_text
from support.report.written_runs import EPOCHS, Line, recipe_plan, run_events, typed


def non_finite(iteration: int, **values: Any) -> Line:
    default = {"time": 1.0, "rule": "skip", "ranks": [1]}
    return {"event": "non_finite", "iteration": iteration, "epoch": 1, **default, **values}


DAMAGED = {"event": "damaged", "path": "step-00000004", "fault": "no state.json", "kept_as": "damaged-step-00000004"}
CHANGED = {"event": "changed", "differences": {"epochs": [3, 5], "data.path": [None, "/data"]}}
DAMAGED_LINE = "checkpoint step-00000004 was damaged and skipped: no state.json; it is now damaged-step-00000004"
CHANGED_LINE = "the run went on with other settings: epochs 3 → 5, data.path None → /data"


def odd_run() -> list[Line]:
    """Step 2 has no finite loss, nor has the whole second epoch; it was resumed before."""
    events: list[Line] = [DAMAGED, CHANGED]
    for event in run_events():
        if event["event"] == "step" and (event["iteration"] == 2 or event["epoch"] == 2):
            event = {**event, "loss": None}
        if event["event"] == "epoch" and event["epoch"] == 2:
            event = {**event, "train_loss": None}
        events.append(event)
        if event["event"] == "step":
            events += [non_finite(2)] if event["iteration"] == 2 else []
    return events


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create(recipe_plan())
    directory.events.write_text("".join(json.dumps({"time": 1.0, **event}) + "\n" for event in odd_run()))
    return directory


def test_lines() -> None:
    odd = (non_finite(7), non_finite(7, ranks=[]), non_finite(7, rule="stop", ranks=[0, 3]))
    check_text("odd-numbers", "\n".join(str(event_line(typed(each))) for each in odd))


def test_page_summary_and_curves(directory: RunDirectory) -> None:
    page = render(directory)
    assert str(event_line(typed(non_finite(2)))) in page
    assert "NaN" not in page
    assert DAMAGED_LINE in page and CHANGED_LINE in page
    record = Record(directory)
    assert len(record.epochs) == EPOCHS
    assert summarise_record(record, recipe_plan(), "done")["metrics"]["train_loss"] is not None


def test_means_leave_gaps_and_what_no_axis_can_show() -> None:
    values = [[1.0, None], [None, None, None], [math.inf, 3.0], [1.7e308, -1.7e308]]
    means = Means()
    for number in range(1200):
        means.add(number, values[number // 2 % 4][number % 2])
    x, y = means.points
    np.testing.assert_array_equal(x, np.arange(600) * 2 + 0.5)
    np.testing.assert_array_equal(y, [1.0, np.nan, 3.0, np.nan] * 150)


@pytest.mark.parametrize(("count", "each"), [(1, 1), (29, 1), (600, 1), (601, 2), (1200, 2), (1201, 3), (4321, 8)])
def test_means_are_those_of_equal_parts(count: int, each: int) -> None:
    values = np.random.default_rng(count).normal(size=(2, count))
    means = Means()
    for x, y in values.T:
        means.add(x, y)
    expected = [[row[begin : begin + each].mean() for begin in range(0, count, each)] for row in values]
    np.testing.assert_allclose(means.points, expected, rtol=1e-9)

"""Reading a run's prediction: the row for it, and files that are damaged or of another run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import Plan, Slots
from hpctrain.report.page import read_comparison, render
from hpctrain.report.predicted import own_prediction, read_prediction
from hpctrain.report.summary import summarise
from support.refusals import refused
from support.report.predicted_plans import figure, record, row, written
from support.report.written_runs import recipe_plan, run_events, script_plan, write_run


def read(path: Path, content: Any, plan: Plan | None = None) -> Any:
    return read_prediction(written(path / "prediction.json", content), plan or recipe_plan())[1]


def test_the_row_of_the_run_s_ranks(tmp_path: Path) -> None:
    others = (row(gpus=8, nodes=4), row(step_s=figure(1, 2, 3)), row(gpus=4, nodes=2))
    assert read(tmp_path, record(*others)).step_s.value == 2


def test_as_many_ranks_on_other_nodes_are_another_run(tmp_path: Path) -> None:
    plan = recipe_plan(hosts=tuple(Slots(host=f"n{number}", slots=1) for number in (1, 2)))
    assert read(tmp_path, record(row(), row(nodes=2, step_s=figure(1, 2, 3))), plan).step_s.value == 2
    with refused("HT-prediction-of-another-run", predicted="other ranks and nodes (2 on 1)", recorded="2 on 2"):
        read(tmp_path, record(), plan)


def test_a_run_trains_for_its_own_epochs(tmp_path: Path) -> None:
    # The recipe has 20.
    found = read(tmp_path, record(row(epochs=figure(9, 10, 11), kwh=figure(1, 2, 3))))
    assert (found.minutes.low, found.minutes.value, found.minutes.high) == (1.8, 2.4, 3.0)
    assert found.kwh.value == 4 and found.step_s.value == 0.5


@pytest.mark.parametrize("epochs", [0, 1e-320, 1e-3])
def test_what_follows_from_few_epochs_is_finite(tmp_path: Path, epochs: float) -> None:
    few = row(epochs=figure(0, epochs, 1), minutes=figure(0, 1e30, 1e30), kwh=figure(0, 1e30, 1e30))
    assert math.isfinite(read(tmp_path, record(few)).kwh.value)


def test_a_script_has_neither_recipe_nor_batch(tmp_path: Path) -> None:
    content = record(row(minutes=None, epochs=None, batch_per_gpu=7.0), recipe="resnet50")
    assert read(tmp_path, content, script_plan()).minutes is None


@pytest.mark.parametrize(
    ("content", "code", "values"),
    [
        ("", "HT-file-not-json", {}),
        ('{"recipe": "digits", "rows": [', "HT-file-not-json", {}),
        ("[1]", "HT-file-value", {}),
        ({"recipe": "digits"}, "HT-file-missing-key", {"key": "rows"}),
        (record(rows=[]), "HT-file-value", {"key": "rows"}),
        (record(row(minutes=figure(0, 1, 1e308))), "HT-file-value", {"key": "rows.0.minutes.high"}),
        (record(row(step_s=3)), "HT-file-value", {"key": "rows.0.step_s"}),
        (record(row(step_s=figure(3, 2, 4))), "HT-prediction-value-outside-range", {"value": 2, "low": 3, "high": 4}),
        (record(row(step_s=figure(0, 1, -1))), "HT-file-value", {"key": "rows.0.step_s.high"}),
        (record(row(gpus=0)), "HT-file-value", {"key": "rows.0.gpus"}),
    ],
)
def test_damaged_files(tmp_path: Path, content: Any, code: str, values: dict[str, object]) -> None:
    with refused(code, where=f"{tmp_path / 'prediction.json'}", **values) as caught:
        read(tmp_path, content)
    remedy = "make one: hpctrain predict digits --gpu NAME --nodes 1 --gpus-per-node 2 --json > prediction.json"
    assert caught.value.hint and caught.value.hint.startswith(remedy)


@pytest.mark.parametrize(
    ("content", "values"),
    [
        (record(recipe="goyal2017"), {"predicted": "goyal2017", "recorded": "digits"}),
        (record(row(gpus=8)), {"predicted": "other ranks and nodes (8 on 1)", "recorded": "2 on 1"}),
        (record(row(batch_per_gpu=64.0)), {"predicted": "steps of 128 samples", "recorded": "64"}),
    ],
)
def test_predictions_of_other_runs(tmp_path: Path, content: Any, values: dict[str, object]) -> None:
    with refused("HT-prediction-of-another-run", path=tmp_path / "prediction.json", **values):
        read(tmp_path, content)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with refused("HT-file-unreadable", path=tmp_path / "none.json"):
        read_prediction(tmp_path / "none.json", recipe_plan())


def test_a_damaged_file_of_the_run_s_own_is_told_and_stops_nothing(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", recipe_plan(), run_events())
    assert own_prediction(directory, recipe_plan()) == (None, None)
    written(directory.prediction, '{"rows"')
    found, fault = own_prediction(directory, recipe_plan())
    assert found is None and fault and fault.startswith(f"{directory.prediction}: ")
    summary = summarise(directory, recipe_plan(), "done")
    assert summary["predicted"] is None and summary["outside"] is None
    assert read_comparison(directory) == (None, fault)
    page = render(directory)
    assert "Invalid JSON" in page and "<h2>Measured" not in page


def test_a_run_without_a_prediction_says_nothing_of_one(finished: RunDirectory) -> None:
    assert "predict" not in render(finished)

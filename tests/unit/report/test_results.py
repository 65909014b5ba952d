"""Medians, means and deviations of results, and what stands beside them from the source."""

from __future__ import annotations

import io
import json
import statistics
from pathlib import Path

import pytest
from rich.console import Console

from hpctrain.cli.main import main
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.directory import RunDirectory
from hpctrain.control.supervision.repeats import Series, array_series, create_series, repeated
from hpctrain.report.page import render
from hpctrain.report.repeats import read_repeats, table
from hpctrain.report.results import MEDIAN, median_accuracy, reported_text, result_name, result_title
from hpctrain.report.summary import summarise
from support.golden import check_text
from support.refusals import refused
from support.report.written_runs import Line, digits, recipe_plan, run_events, typed, write_run
from support.schedulers.slurm_programs import write_submission

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


def events_of(accuracy: float) -> list[Line]:
    """A run whose last epoch has this accuracy."""
    events = run_events()
    last = max(index for index, event in enumerate(events) if event["event"] == "epoch")
    return [{**event, "test_accuracy": accuracy} if index == last else event for index, event in enumerate(events)]


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


def test_odd_names_in_the_table_of_a_series(series: Series) -> None:
    odd = read_repeats(series).model_copy(update={"recipe": "[red]x[/y]", "reported_text": "0.7 ([/z])"})
    console = Console(width=100, file=io.StringIO())
    console.print(table(odd))
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert "[red]x[/y]: " in printed
    assert "0.7 ([/z])" in printed


def test_source_is_asked_for_the_batch_of_the_run() -> None:
    of_any = ({"value": 0.7, "remark": "of any batch"}, *GOYAL)
    twice = ({"value": 0.735, "batch": 64, "remark": "minimal"}, {"value": 0.752, "batch": 64, "remark": "extended"})
    asked = (recipe(size=8192), recipe(size=64), recipe(of_any, size=64), recipe(of_any, size=256), recipe(twice))
    check_text("reported", "\n".join(map(reported_text, asked)))
    assert result_name(recipe(median_of=1)) == "test_accuracy"
    assert result_name(recipe(({"metric": "test_loss", "value": 1.0},), median_of=5)) == "test_loss"


@pytest.mark.parametrize(("size", "said"), [(8192, "reported: 0.7626 ± 0.0009"), (64, "nothing reported for batch 64")])
def test_page_has_the_median_beside_the_source_s_row(tmp_path: Path, size: int, said: str) -> None:
    plan = recipe_plan(recipe=recipe(size=size))
    page = render(write_run(tmp_path / "run", plan, [*run_events()[:1], *epochs(ACCURACIES[:-1])]))
    card = page[page.index("<dt>test accuracy, median of the last 5 epochs</dt>") :]
    card = card[: card.index("</div>")]
    assert '<span class="value">0.7200</span>' in card
    assert said in card


RESULTS = {7: 0.981, 8: 0.992, 9: 0.9755}


@pytest.fixture
def series(tmp_path: Path) -> Series:
    """Three seeds, all done."""
    plan = recipe_plan(recipe=recipe(median_of=1, size=8192))
    series = create_series(tmp_path / "series", repeated(plan, len(RESULTS)))
    for seed, directory in series.runs.items():
        write_events(directory, events_of(RESULTS[seed]))
    return series


def write_events(directory: RunDirectory, events: list[Line]) -> None:
    directory.events.write_text("".join(json.dumps(event) + "\n" for event in events))


def test_mean_and_deviation_of_the_sample(series: Series) -> None:
    found = read_repeats(series)
    assert {run.seed: run.value for run in found.runs} == RESULTS
    assert found.mean == pytest.approx(statistics.mean(RESULTS.values()), abs=1e-12)
    assert found.deviation == pytest.approx(statistics.stdev(RESULTS.values()), abs=1e-12)
    assert [row.value for row in found.reported] == [0.7626]
    assert (found.done, found.batch, found.ranks, found.metric) == (3, 8192, 2, "test_accuracy")


def test_only_what_is_done_counts(series: Series) -> None:
    write_events(series.runs[8], run_events(epochs=2))
    series.runs[9].events.unlink()
    found = read_repeats(series)
    assert [run.status for run in found.runs] == ["done", "unfinished", "not begun"]
    assert (found.mean, found.deviation) == (RESULTS[7], None)


def test_a_diverged_run_leaves_no_mean(series: Series) -> None:
    write_events(series.runs[8], events_of(float("nan")))
    found = read_repeats(series)
    assert (found.runs[1].status, found.runs[1].value, found.mean, found.deviation) == ("done", None, None, None)


def test_report_of_a_series(series: Series, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(series.path)]) == 0
    file = series.path / "report.html"
    assert capsys.readouterr().out == f"{file}\n"
    page = file.read_text()
    mean = f"{statistics.mean(RESULTS.values()):.4f} ± {statistics.stdev(RESULTS.values()):.4f}"
    for row in ("<td>7</td><td>done</td><td>0.9810</td>", f"<td>mean</td><td>3 of 3 done</td><td>{mean}</td>"):
        assert f"<tr>{row}</tr>" in page
    cell = "reported</td><td>0.7626 ± 0.0009</td>"
    assert cell in page
    assert main(["report", str(series.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mean"] == pytest.approx(statistics.mean(RESULTS.values()), abs=1e-12)
    assert found["seeds"] == [7, 8, 9]


@pytest.fixture
def array(series: Series) -> RunDirectory:
    """The same runs as the tasks of an array."""
    found = RunDirectory(series.path.parent / "array")
    found.path.mkdir()
    for task, directory in enumerate(series.runs.values(), start=4):
        directory.path.rename(found.path / f"task-{task}")
    write_submission(found, "12")
    return found


def test_the_report_of_an_array_of_seeds_has_their_mean(
    array: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    found = array_series(array.path)
    assert found is not None
    assert read_repeats(found).mean == pytest.approx(statistics.mean(RESULTS.values()), abs=1e-12)
    assert main(["report", str(array.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seeds"] == [*RESULTS]
    assert main(["report", str(array.path)]) == 0
    assert (array.path / "report.html").exists()


def test_tasks_that_differ_in_more_than_the_seed_have_no_mean(array: RunDirectory) -> None:
    plan = array.path / "task-5" / "plan.json"
    content = json.loads(plan.read_text())
    content["recipe"]["epochs"] += 1
    plan.write_text(json.dumps(content))
    with refused("HT-array-not-of-seeds", tasks=3):
        array_series(array.path)
    assert main(["report", str(array.path / "task-5")]) == 0

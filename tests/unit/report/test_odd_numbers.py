"""What a reader is shown of odd numbers, damaged checkpoints and changed settings."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from written_runs import EPOCHS, recipe_plan, run_events

from hpctrain.batch.find_run import find_run
from hpctrain.events import Event, EventWriter, kept, read_events
from hpctrain.report.console import Console
from hpctrain.report.curves import _means
from hpctrain.report.faults import in_a_row, non_finite_line, spike_line
from hpctrain.report.page import render
from hpctrain.report.record import Record
from hpctrain.report.status import RunStatus, read_status
from hpctrain.report.summary import summarise_record
from hpctrain.report.tensorboard import TensorBoardWriter
from hpctrain.rundir import RunDirectory


def non_finite(iteration: int, **values: Any) -> Event:
    default = {"rule": "skip", "ranks": [1], "parameters": 2, "parameter": "head", "to": None}
    return {"event": "non_finite", "iteration": iteration, "epoch": 1, **default, **values}


def spike(iteration: int, loss: float = 9.0) -> Event:
    return {"event": "spike", "iteration": iteration, "epoch": 1, "loss": loss, "median": 1.5}


DAMAGED = {"event": "damaged", "path": "step-00000004", "fault": "no state.json", "kept_as": "damaged-step-00000004"}
CHANGED = {"event": "changed", "differences": {"epochs": [3, 5], "data.path": [None, "/data"]}}
DAMAGED_LINE = "checkpoint step-00000004 was damaged, and passed over: no state.json; it is damaged-step-00000004 now"
CHANGED_LINE = "the run went on with other settings: epochs 3 → 5, data.path None → /data"


def odd_run() -> list[Event]:
    """Step 2 has no finite loss, nor has the whole second epoch; spikes in steps 5, 6 and 9; it was resumed before."""
    events: list[Event] = [DAMAGED, CHANGED]
    for event in run_events():
        if event["event"] == "step" and (event["iteration"] == 2 or event["epoch"] == 2):
            event = {**event, "loss": None}
        if event["event"] == "epoch" and event["epoch"] == 2:
            event = {**event, "train_loss": None}
        events.append(event)
        if event["event"] == "step":
            events += [non_finite(2)] if event["iteration"] == 2 else []
            events += [spike(event["iteration"], event["iteration"])] if event["iteration"] in (5, 6, 9) else []
    return events


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create(recipe_plan())
    directory.events.write_text("".join(json.dumps({"time": 1.0, **event}) + "\n" for event in odd_run()))
    return directory


def test_lines() -> None:
    assert non_finite_line(non_finite(7)) == (
        "step 7 had numbers that are not finite on rank 1: its update was left out"
    )
    back = non_finite(7, rule="roll_back", ranks=[], to=4)
    assert non_finite_line(back) == (
        "step 7 had numbers that are not finite: the run goes on after it with the parameters of step 4"
    )
    assert non_finite_line(non_finite(7, rule="stop", ranks=[0, 3])).endswith("on rank 0, 3: the run ends")
    assert spike_line([spike(7)]) == "step 7: the loss was up to 9, where 1.5 was the median before"
    groups = in_a_row([spike(3), spike(4, 20.0), spike(5), spike(9)])
    assert [spike_line(group).split(":")[0] for group in groups] == ["steps 3 to 5", "step 9"]
    assert "up to 20," in spike_line(groups[0])


@pytest.mark.parametrize("terminal", [False, True])
def test_console(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    monkeypatch.setenv("TERM", "xterm")
    stream = Stream()
    with Console(Stream(), stream) as console:
        for event in odd_run():
            console.show({"time": 1.0, **event})
    text = stream.getvalue()
    assert text.count("step 2 had numbers that are not finite on rank 1") == 1
    # Of steps in a row the first is told.
    assert text.count("the loss was up to") == 2 and "step 6: the loss" not in text
    assert "train loss not finite" in text
    assert text.count(DAMAGED_LINE) == 1 and text.count(CHANGED_LINE) == 1


def test_page_summary_and_curves(directory: RunDirectory) -> None:
    page = render(directory)
    assert "step 2 had numbers that are not finite on rank 1: its update was left out" in page
    assert "steps 5 to 6: the loss was up to 6" in page and "step 9: the loss" in page
    assert "NaN" not in page
    assert DAMAGED_LINE in page and CHANGED_LINE in page
    record = Record.read(directory)
    assert len(record.epochs) == EPOCHS
    assert summarise_record(record, recipe_plan(), "done")["metrics"]["train_loss"] is not None


def test_many_lines_leave_room_for_the_figures(directory: RunDirectory) -> None:
    with directory.events.open("a") as file:
        file.writelines(json.dumps({"time": 1.0, **non_finite(7)}) + "\n" for _ in range(30))
    page = render(directory)
    assert page.count("step 7 had numbers") == 30
    before, _, after = page.partition("<details>")
    assert before.count('<p class="note">') == 10 and "<summary" in after


def test_status(directory: RunDirectory) -> None:
    found, _ = read_status(find_run(str(directory.path)))
    assert isinstance(found, RunStatus) and found.survived == (DAMAGED_LINE,)


def test_tensorboard(directory: RunDirectory) -> None:
    with TensorBoardWriter(directory) as writer:
        for event in read_events(directory.events):
            writer.show(event)
    assert next(directory.tensorboard.iterdir()).stat().st_size > 0


def test_means_leave_gaps() -> None:
    values = np.array([1.0, np.nan, np.nan, np.nan, np.inf, 3.0])
    np.testing.assert_array_equal(_means(values, 3), [1.0, np.nan, 3.0])


def test_what_was_lost_is_done_again_and_told_again() -> None:
    steps = [{"event": "step", "iteration": iteration} for iteration in (1, 2, 3)]
    first = [{"event": "start", "attempt": 1, "iteration": 0}, *steps, non_finite(3), spike(3)]
    again = [{"event": "start", "attempt": 2, "iteration": 2}, steps[2], non_finite(3)]
    assert [event["event"] for event in kept([*first, *again])].count("non_finite") == 1
    assert not any(event["event"] == "spike" for event in kept([*first, *again]))


def test_what_is_not_finite_is_null_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as events:
        events.emit("step", iteration=1, loss=float("nan"), a=float("inf"), b=np.float64("-inf"), c=1.5)
    assert (
        json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word)).items()
        >= {
            "loss": None,
            "a": None,
            "b": None,
            "c": 1.5,
        }.items()
    )

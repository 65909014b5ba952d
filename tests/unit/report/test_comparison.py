"""What a run took beside what was predicted of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.cluster.gpus import SHARING_NOTE
from hpctrain.common.run.events.kinds import EnergyEvent, HostEnergy
from hpctrain.common.run.plan import Start
from hpctrain.report.comparison import Comparison, compare, comparison_keys
from hpctrain.report.page import render
from hpctrain.report.predicted import PredictedRow
from hpctrain.report.summary import summarise
from support.golden import check_text
from support.report.predicted_plans import figure, record, row, written
from support.report.written_runs import (
    EPOCHS,
    STEPS,
    Line,
    digits,
    recipe_plan,
    record_of,
    run_events,
    typed,
    write_run,
)

# The run took 10.5 s, and had 3 epochs.
PLAN = recipe_plan(recipe=digits().model_copy(update={"epochs": EPOCHS}))
ALL = ["step_s", "samples_per_s", "communication_share", "minutes"]


def predicted(**changes: Any) -> PredictedRow:
    values = {"epochs": figure(3, 3, 3), "minutes": figure(0.15, 0.17, 0.2), **changes}
    return PredictedRow.model_validate(row(**values))


def compared(events: Sequence[Line] | None = None, **changes: Any) -> Comparison:
    return compare(record_of([*map(typed, events or run_events())]), PLAN, predicted(**changes))


def verdicts(comparison: Comparison) -> dict[str, str | None]:
    return {figure.name: figure.verdict for figure in comparison.figures}


def test_all_inside() -> None:
    found = compared()
    assert verdicts(found) == dict.fromkeys(ALL, "inside")
    assert (found.outside, found.causes, found.note) == ([], (), "")
    # The first step, of 5 s, does not count.
    assert [each.measured for each in found.figures] == pytest.approx([0.5, 128, 0.2, 10.5 / 60])
    check_text("comparison", "\n".join(found.lines))


def test_faster() -> None:
    found = compared(step_s=figure(0.6, 0.7, 0.8), samples_per_s=figure(70, 90, 110), minutes=figure(1, 2, 3))
    assert verdicts(found) == {**dict.fromkeys(ALL, "faster"), "communication_share": "inside"}
    assert found.outside == ["step_s", "samples_per_s", "minutes"]
    assert found.causes == ()


SLOW = {"step_s": figure(0.3, 0.35, 0.4), "samples_per_s": figure(150, 180, 200)}


def test_slower_by_the_computing_itself() -> None:
    found = compared(**SLOW)
    slow = "slower than predicted"
    assert verdicts(found) == {**dict.fromkeys(ALL, "inside"), "step_s": slow, "samples_per_s": slow}
    (cause,) = found.causes
    check_text("comparison-computation", cause)


@pytest.mark.parametrize(("waited", "input_bound"), [(0.07, False), (0.08, True)])
def test_slower_by_the_input(waited: float, input_bound: bool) -> None:
    # A step takes 0.15 s too long; the input counts from half of that on.
    events = [{**event, "data_seconds": waited} if event["event"] == "step" else event for event in run_events()]
    (cause,) = compared(events, **SLOW).causes
    assert cause.endswith("bench loader") == input_bound


@pytest.mark.parametrize(
    ("nodes", "where", "look"), [(1, "shared cores", "doctor"), (2, "the fabric", "topology verify")]
)
def test_slower_by_the_reductions(nodes: int, where: str, look: str) -> None:
    found = compared(**SLOW, nodes=nodes, communication_share=figure(0.01, 0.02, 0.05))
    assert found.outside[-1] == "communication_share"
    (cause,) = found.causes
    assert "20 %" in cause and "5 %" in cause and where in cause
    assert f"hpctrain {look}, " in cause


STALL: Line = {
    "time": 1.0,
    "event": "stall",
    "rank": 1,
    "host": "node7",
    "iteration": 3,
    "waiting_for": "an all-reduce",
    "seconds": 40.0,
}


def test_slower_by_a_rank() -> None:
    events = run_events()
    (cause,) = compared([events[0], STALL, *events[1:]], **SLOW).causes
    check_text("comparison-stalled-rank", cause)
    assert compared([events[0], STALL, *events[1:]]).causes == (), "a run that is not slow needs no cause"


@pytest.mark.parametrize(("blocked", "word"), [(4.0, "checkpoints held"), (0.1, "the time was lost between them")])
def test_slower_between_the_steps(blocked: float, word: str) -> None:
    checkpoint = {"time": 1.0, "event": "checkpoint", "iteration": 4, "blocked_seconds": blocked}
    events = run_events()
    found = compared([*events[:-1], checkpoint, events[-1]], minutes=figure(0.05, 0.06, 0.07))
    assert found.outside == ["minutes"]
    (cause,) = found.causes
    assert word in cause


def test_a_run_that_is_not_done_has_no_time_yet() -> None:
    found = compared(run_events(epochs=2))
    assert verdicts(found) == {**dict.fromkeys(ALL, "inside"), "minutes": None}
    keys = comparison_keys(found)
    assert keys["predicted"]["minutes"] == {"value": 0.17, "low": 0.15, "high": 0.2}
    assert keys["outside"] == []
    assert not any(line.startswith("time") for line in found.lines)


def test_nothing_was_measured_yet() -> None:
    found = compared(run_events()[:1])
    assert set(verdicts(found).values()) == {None} and found.lines == []


def test_energy_is_of_a_part_of_the_node() -> None:
    hosts = {"node1": HostEnergy(began=1.0, seconds=1.0, joules={"gpu": 3.6e6})}
    drawn: Line = json.loads(json.dumps(EnergyEvent(time=1.0, iteration=EPOCHS * STEPS, hosts=hosts).record()))
    events = [*run_events()[:-1], drawn, run_events()[-1]]
    for low, verdict, outside in ((0.5, "inside", []), (2.0, None, []), (0.1, "more than predicted", ["kwh"])):
        found = compared(events, kwh=figure(low, 1.5 * low, 3 * low))
        assert (verdicts(found)["kwh"], found.outside) == (verdict, outside)
    assert found.lines[5].split("  ")[0] == "energy, kWh"
    check_text("comparison-energy", found.lines[5])
    # Half a run drew half of it.
    assert verdicts(compared([*events[:-1], {**events[-1], "status": "failed"}], kwh=figure(1, 2, 3)))["kwh"] is None
    # Where nothing could be read there is nothing to compare.
    assert verdicts(compared(kwh=figure(1, 2, 3)))["kwh"] is None


def test_a_run_that_had_other_ranks_is_not_compared(tmp_path: Path) -> None:
    events = run_events()
    again = {**events[0], "ranks": 1}
    found = compared([*events[:9], again, *events[9:]])
    check_text("comparison-other-ranks", found.note)
    assert (found.figures, found.lines) == ((), [found.note])
    assert comparison_keys(found) == {"predicted": None, "outside": None}
    directory = write_run(tmp_path / "run", PLAN, [*events[:9], again, *events[9:]])
    written(directory.prediction, record())
    page = render(directory)
    assert found.note in page and "<h2>Measured" not in page


def test_ranks_that_shared_gpus_are_not_compared(tmp_path: Path) -> None:
    shared = PLAN.model_copy(update={"start": Start(share_gpus=True)})
    found = compare(record_of([*map(typed, run_events())]), shared, predicted())
    assert found.note and comparison_keys(found) == {"predicted": None, "outside": None}
    directory = write_run(tmp_path / "shared", shared, run_events())
    assert summarise(directory, shared, "done")["shared_gpus"] is True
    assert SHARING_NOTE in render(directory)
    alone = write_run(tmp_path / "alone", PLAN, run_events())
    assert summarise(alone, PLAN, "done")["shared_gpus"] is False
    assert SHARING_NOTE not in render(alone)


def test_a_run_that_lost_ranks_is_not_compared() -> None:
    lost: Line = {"time": 1.0, "event": "fault", "rank": 1, "host": "node1", "message": "rank 1 died", "iteration": 5}
    lost |= {"recovery_seconds": 0.1, "samples_affected": 32, "ranks": 1}
    events = run_events()
    note = compared([*events[:9], lost, *events[9:]]).note
    assert re.findall(r"\d+", note)[-2:] == ["1", "2"]


def test_the_summary_and_the_page(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", PLAN, run_events())
    written(directory.prediction, record(row(**SLOW, epochs=figure(3, 3, 3), minutes=figure(0.15, 0.17, 0.2))))
    summary = summarise(directory, PLAN, "done")
    assert summary["predicted"]["step_s"] == {"value": 0.35, "low": 0.3, "high": 0.4, "measured": 0.5}
    assert list(summary["predicted"]) == ALL
    assert summary["outside"] == ["step_s", "samples_per_s"]
    page = render(directory)
    figures = re.findall(r"350 ms \[300 ms, 400 ms\]</td>", page)
    assert "<h2>Measured" in page and figures and "slower" in page and "computation" in page


@given(ends=st.tuples(*[st.floats(1e-6, 1e3)] * 3).map(sorted), seconds=st.floats(1e-6, 1e3), share=st.floats(0, 1))
def test_outside_is_what_is_not_in_its_range(ends: list[float], seconds: float, share: float) -> None:
    events = [
        {**event, "seconds": seconds, "communication_seconds": share * seconds} if event["event"] == "step" else event
        for event in run_events()
    ]
    low, value, high = ends
    found = compared(events, step_s=figure(low, value, high))
    assert ("step_s" in found.outside) == (not low <= seconds <= high)
    assert bool(found.causes) >= (seconds > high)

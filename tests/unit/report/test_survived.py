"""Faults that a run got over, and stalls: what is said of them, and what they are told apart from."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli.main import main
from hpctrain.control.schedulers.run_jobs import find_run
from hpctrain.report.console import Console
from hpctrain.report.page import render
from hpctrain.report.record import Record
from hpctrain.report.status import read_status
from hpctrain.report.summary import summarise
from hpctrain.report.tracking.curves import Curves
from support.report.written_runs import Line, recipe_plan, record_of, run_events, typed, write_run

RECOVERED = {"iteration": 7, "recovery_seconds": 0.0321, "samples_affected": 1, "ranks": 3}
LINES = {
    "recovered": "rank 2 (n3) was lost at step 7; the other 3 went on after 0.032 s, 1 sample affected",
    "host": "host n3 was lost, and its ranks with it",
    "stall": "rank 1 (n2) stalled: others have been waiting 31 s for it in the reduction of bucket 2 of step 9",
}


def event(kind: str, **values: Any) -> Line:
    return {"time": time.time(), "event": kind, **values}


def start(attempt: int, iteration: int) -> Line:
    return event("start", attempt=attempt, iteration=iteration, job=None, hosts=["n1"], pid=1, host="elsewhere")


RANK = event("fault", rank=2, host="n3", message="rank 2 died", **RECOVERED)
HOST = event("fault", rank=None, host="n3", message=LINES["host"])
KILLED = event("fault", rank=0, host="n1", message="rank 0 on n1 was killed")
WAITED = "the reduction of bucket 2"
STALL = event("stall", rank=1, host="n2", iteration=9, waiting_for=WAITED, seconds=31.2, state="stopped")


def test_the_console_says_each_in_a_line() -> None:
    err = io.StringIO()
    console = Console(io.StringIO(), err)
    for each in (RANK, HOST, STALL, {**STALL, "iteration": None}):
        console.show(typed(each))
    assert err.getvalue().splitlines() == [*LINES.values(), LINES["stall"].rpartition(" of ")[0]]


def test_what_the_run_got_over_is_told_from_what_ended_it() -> None:
    """The checkpoint of step 4 was before the loss of step 7: it happened all the same."""
    whole = [start(1, 0), *run_events(2), RANK, HOST, start(2, 4), KILLED]
    record = record_of(map(typed, whole))
    assert ([fault for _, fault in record.survived], record.faults) == ([typed(RANK), typed(HOST)], (typed(KILLED),))
    # Its launcher did not go on: somebody else did.
    resumed = [start(1, 0), HOST, event("end", status="resumable"), start(2, 0)]
    assert (record_of(map(typed, resumed)).survived, record_of(map(typed, resumed[:-1])).faults) == ([], (typed(HOST),))


def shrunk_events(per_epoch: tuple[int, ...]) -> list[Line]:
    """A run that was to have 3 epochs of 4 steps, and has these."""
    run, first = run_events(1)[:2]
    events: list[Line] = [run]
    iteration = 0
    for epoch, steps in enumerate(per_epoch, start=1):
        for _ in range(steps):
            iteration += 1
            events.append({**first, "iteration": iteration, "epoch": epoch})
        events.append({**run_events(1)[-1], "epoch": epoch})
    return events


def test_more_steps_than_the_run_began_with(tmp_path: Path) -> None:
    """Batches that shrank with the ranks make epochs longer."""
    for per_epoch, iterations in (((4, 6), 14), ((4, 6, 7), 17), ((4, 4), 12)):
        events = shrunk_events(per_epoch)
        record = Record(write_run(tmp_path / str(per_epoch), recipe_plan(), events))
        assert (record.iteration, record.iterations) == (sum(per_epoch), iterations)


def test_status_report_and_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = [start(1, 0), *run_events(2), HOST, start(2, 8), RANK, STALL, event("end", status="done", seconds=3.0)]
    run = write_run(tmp_path / "run", recipe_plan(), written)
    summary = summarise(run, recipe_plan(), "done")
    rank = {"attempt": 2, "rank": 2, "host": "n3", "message": "rank 2 died", **RECOVERED}
    assert summary["survived"] == [{"attempt": 1, "rank": None, "host": "n3", "message": LINES["host"]}, rank]
    run.summary.write_text(json.dumps(summary))
    status, _ = read_status(find_run(str(run.path)))
    assert (status.survived, status.stalls) == ((LINES["host"], LINES["recovered"]), (LINES["stall"],))
    assert status.message == ""
    assert main(["status", str(run.path)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split("  ", 1)[1].strip() for line in table[-3:]] == [*status.survived, *status.stalls]
    page = render(run)
    for line in LINES.values():
        assert f'<p class="note">{line}</p>' in page
    assert 'class="note failed"' not in page


def test_a_slow_rank_is_in_the_status_the_report_its_plot_and_the_curves(tmp_path: Path, drawn: None) -> None:
    slow = event("slow_rank", iteration=6, rank=1, host="n2", cause="link", seconds=0.02, usual=0.002)
    run = write_run(tmp_path / "run", recipe_plan(), [start(1, 0), *run_events(2), slow])
    status, _ = read_status(find_run(str(run.path)))
    (line,) = status.stalls
    page, without = (render(each) for each in (run, write_run(tmp_path / "other", recipe_plan(), run_events(2))))
    assert line in page
    assert ("slow rank named" in page, "slow rank named" in without) == (True, False)
    point = Curves().point(typed(slow))
    assert point is not None
    assert (point.iteration, point.values) == (6, {"slow_rank/1/link": 0.02})

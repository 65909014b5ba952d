"""Which events a tracker still lacks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import kept, read_events
from hpctrain.control.supervision.follow import Tail
from hpctrain.report.tracking import following
from hpctrain.report.tracking.following import Backlog, NewEvent, follow
from hpctrain.report.tracking.progress import TrackerProgress, only_sender, read_progress, write_progress
from support.report.written_runs import recipe_plan, run_events, write_run

START = {"time": 1_700_000_000.0, "event": "start", "attempt": 1, "iteration": 0}
AGAIN = {**START, "attempt": 2, "iteration": 4, "time": 1_700_000_050.0}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """Of a run that was cut off in its second epoch, at step 8."""
    return write_run(tmp_path / "run", recipe_plan(), [START, *run_events(2)])


def add(directory: RunDirectory, *events: dict[str, Any]) -> None:
    with directory.events.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def test_what_was_lost_before_it_was_sent_is_not_sent(directory: RunDirectory) -> None:
    """Whether it is read before or after the attempt that undoes it."""
    early = Backlog(directory, TrackerProgress(), pytest.fail)
    assert not early.read()
    add(directory, AGAIN, *run_events()[6:])
    assert early.read()
    late = Backlog(directory, TrackerProgress(), pytest.fail)
    assert not late.read()
    expected = [*kept(read_events(directory.events))]
    assert [entry.event for entry in early.entries] == [entry.event for entry in late.entries] == expected


def test_only_what_is_not_sent_yet(directory: RunDirectory) -> None:
    events = [*read_events(directory.events)]
    backlog = Backlog(directory, TrackerProgress(sent=5, time=events[4].time), pytest.fail)
    backlog.read()
    assert backlog.fits
    assert [entry.event for entry in backlog.entries] == events[5:]
    # The epoch's step is known, though that was sent.
    points = [entry.point for entry in backlog.entries if entry.point]
    assert [point.iteration for point in points if "epoch/test_loss" in point.values] == [4, 8]


def test_a_long_run_is_handed_over_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is of what counts, though the attempt that undoes the rest is read last."""
    monkeypatch.setattr(following, "_PART_BYTES", 2**18)
    monkeypatch.setattr(Tail.__init__, "__kwdefaults__", {"whole": False, "longest": 2**15})
    step = run_events(1)[1]
    lost = [{**step, "iteration": number} for number in range(1, 5000)]
    again = [{**step, "iteration": number, "time": 1.0} for number in range(1001, 4000)]
    directory = write_run(
        tmp_path / "run", recipe_plan(), [START, run_events()[0], *lost, {**AGAIN, "iteration": 1000}, *again]
    )
    got: list[list[NewEvent]] = []

    class Tracker:
        rewrites = True
        place = "a list"

        def open(self) -> TrackerProgress:
            got.clear()
            return TrackerProgress()

        def send(self, entries: Sequence[NewEvent]) -> None:
            got.append([*entries])

        def close(self) -> None:
            pass

    assert follow(directory, Tracker(), ended=lambda seconds: True, say=print)
    assert [entry.event for part in got for entry in part] == [*kept(read_events(directory.events))]
    assert len(got) > 3 and max(map(len, got)) < 2000


def test_lines_that_a_crash_took_back_are_noticed(directory: RunDirectory) -> None:
    lines = directory.events.read_bytes().splitlines(keepends=True)
    events = [*read_events(directory.events)]
    has = TrackerProgress(sent=len(events), time=events[-1].time)
    directory.events.write_bytes(b"".join(lines[:-3]) + b"\0\0\0\n")
    backlog = Backlog(directory, has, pytest.fail)
    backlog.read()
    assert not backlog.fits
    add(directory, AGAIN, *run_events()[6:8])
    backlog.read()
    assert not backlog.fits


def test_a_damaged_line_is_passed_over_with_one_warning(directory: RunDirectory) -> None:
    """Also where the tracker's failure has the lines read again."""
    whole = [*kept(read_events(directory.events))]
    add(directory, {"no": "event"})
    directory.events.write_bytes(directory.events.read_bytes() + b"no JSON\n")
    add(directory, {**run_events()[1], "iteration": 9})
    got: list[NewEvent] = []
    said: list[str] = []
    fails = iter([True, False])

    class Tracker:
        rewrites = False
        place = "a list"

        def open(self) -> TrackerProgress:
            return TrackerProgress()

        def send(self, entries: Sequence[NewEvent]) -> None:
            if next(fails, False):
                raise OSError("is away")
            got.extend(entries)

        def close(self) -> None: ...

    ends = iter([False, False])
    assert follow(directory, Tracker(), ended=lambda seconds: next(ends, True), say=said.append)
    assert [entry.event for entry in got][:-1] == whole and got[-1].event.iteration == 9
    assert got[-1].number == len(whole) + 3
    assert [each.split(": not an event")[0] for each in said if "not an event" in each] == [
        f"warning: {directory.events}:{len(whole) + 1}"
    ]


def test_progress_is_kept(directory: RunDirectory) -> None:
    with only_sender(directory, "mlflow"):
        progress = read_progress(directory, "mlflow")
        assert read_progress(directory, "mlflow") == progress
        assert read_progress(directory, "wandb").id != progress.id
        write_progress(directory, "mlflow", progress.model_copy(update={"run": "a", "sent": 3, "time": 1.5}))
        assert read_progress(directory, "mlflow") == TrackerProgress(id=progress.id, run="a", sent=3, time=1.5)

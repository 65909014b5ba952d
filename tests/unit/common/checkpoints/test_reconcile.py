"""Checkpoints that the events tell of, against those that are there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cli.main import main
from hpctrain.common.checkpoints.find import missing
from hpctrain.common.checkpoints.layout import checkpoint_path
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event
from hpctrain.common.run.events.kinds import CheckpointEvent, EndEvent, StartEvent
from hpctrain.control.resuming.attempts import attempt_from_here, run_events
from support.script_runs import happened, script_run
from support.written_checkpoints import progress_of, write_checkpoint


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return script_run(tmp_path / "run", ranks=1)


def write(directory: RunDirectory, *iterations: int) -> None:
    for each in iterations:
        write_checkpoint(directory.checkpoints, progress_of(each), {"a": np.zeros(3)})


def remove(directory: RunDirectory, iteration: int) -> None:
    shutil.rmtree(checkpoint_path(directory.checkpoints, iteration))


BEGUN = StartEvent(attempt=1, iteration=0)


def gone(directory: RunDirectory) -> list[int]:
    return missing(directory.checkpoints, run_events(directory))


def test_the_newest_is_gone(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    write(directory, 20, 30)
    kept = (CheckpointEvent(iteration=10, kept=(10,)), CheckpointEvent(iteration=20, kept=(10, 20)))
    # The first one was deleted by the rules of the run.
    happened(directory, BEGUN, *kept, CheckpointEvent(iteration=30, kept=(20, 30)), EndEvent(status="resumable"))
    assert gone(directory) == []
    assert main(["checkpoint", "verify", str(directory.path)]) == 0
    remove(directory, 30)
    assert gone(directory) == [30]
    further = attempt_from_here(directory, run_events(directory))
    assert further is not None
    assert (further.iteration, further.missing) == (20, (checkpoint_path(directory.checkpoints, 30),))
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(directory.path)]) == 3
    assert "step-00000020: ok" in capsys.readouterr().out
    assert main(["checkpoint", "list", str(directory.path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["iteration"], row["state"]) for row in rows] == [(20, "newest"), (30, "missing")]
    # Once it was told, the events of after it do not count any more.
    happened(directory, StartEvent(attempt=2, iteration=20))
    assert gone(directory) == []
    remove(directory, 20)
    assert gone(directory) == [20]


def test_an_older_one_is_gone_which_no_attempt_needs(directory: RunDirectory) -> None:
    write(directory, 20, 30)
    happened(directory, BEGUN, CheckpointEvent(iteration=30, kept=(20, 30)))
    remove(directory, 20)
    assert gone(directory) == [20]
    further = attempt_from_here(directory, run_events(directory))
    assert further is not None and (further.iteration, further.missing) == (30, ())


def test_a_crash_after_a_checkpoint_and_before_its_event(directory: RunDirectory) -> None:
    write(directory, 30, 40)
    happened(directory, BEGUN, CheckpointEvent(iteration=30, kept=(20, 30)))
    assert gone(directory) == []


@given(
    last=st.integers(1, 3),
    saves=st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=8),
    lost=st.sets(st.integers(0, 3)),
)
def test_what_retention_deletes_is_never_missing(
    tmp_path_factory: pytest.TempPathFactory, last: int, saves: list[tuple[int, bool]], lost: set[int]
) -> None:
    """Against a list of what was written and what was deleted by hand, over attempts that begin anywhere."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    folder.mkdir()
    events: list[Event] = [BEGUN]
    there: list[int] = []
    now = 0
    for further, again in saves:
        if again and there:
            # The newest was damaged and set aside.
            checkpoint_path(folder, there.pop()).rmdir()
            now = there[-1] if there else 0
            events.append(StartEvent(attempt=2, iteration=now))
        now += further
        checkpoint_path(folder, now).mkdir()
        there = [*there, now]
        for old in there[:-last]:
            checkpoint_path(folder, old).rmdir()
        there = there[-last:]
        events.append(CheckpointEvent(iteration=now, kept=tuple(there)))
        assert missing(folder, events) == []
    deleted = sorted(there[each] for each in lost if each < len(there))
    for each in deleted:
        checkpoint_path(folder, each).rmdir()
    assert missing(folder, events) == deleted

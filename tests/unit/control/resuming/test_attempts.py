"""What --resume begins from, when it refuses, and that a run has one launcher."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hpctrain.common.checkpoints.find import set_aside
from hpctrain.common.checkpoints.layout import checkpoint_path
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events.kinds import CheckpointEvent, EndEvent, FaultEvent, StartEvent
from hpctrain.common.run.records import holding
from hpctrain.control.resuming import attempts
from hpctrain.control.resuming.attempts import Attempt, hold_run, next_attempt, require_attempt_ended, run_events
from support.refusals import refused
from support.script_runs import happened, script_run
from support.written_checkpoints import progress_of, write_checkpoint


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return script_run(tmp_path / "it's a run")


def start(iteration: int = 0, **more: Any) -> StartEvent:
    return StartEvent(attempt=1, iteration=iteration, **more)


def checkpoint(directory: RunDirectory, iteration: int) -> CheckpointEvent:
    write_checkpoint(directory.checkpoints, progress_of(iteration), {"a": np.zeros(3)})
    return CheckpointEvent(iteration=iteration)


FAULT = FaultEvent(rank=1, host="n2", message="rank 1 on n2 was killed")
RESUMABLE = EndEvent(status="resumable")


def go_on(directory: RunDirectory, restarts: int | None = None, *, script: bool = False) -> Attempt | None:
    return next_attempt(directory, run_events(directory), restarts, script=script)


def test_a_submitted_run_begins(directory: RunDirectory) -> None:
    assert go_on(directory) == Attempt()


def test_a_run_that_is_done_is_not_started(directory: RunDirectory) -> None:
    happened(directory, start(), EndEvent(status="done"))
    assert go_on(directory) is None
    # A rank failed although rank 0 was done.
    happened(directory, FAULT, EndEvent(status="failed"))
    assert go_on(directory) == Attempt(number=2)


def test_the_newest_whole_checkpoint_is_taken(directory: RunDirectory) -> None:
    happened(directory, start(), checkpoint(directory, 10), checkpoint(directory, 20))
    assert go_on(directory) == Attempt(number=2, iteration=20)
    (checkpoint_path(directory.checkpoints, 20) / "rank-0-of-1.safetensors").write_bytes(b"")
    found = go_on(directory)
    assert found is not None
    assert (found.iteration, len(found.damaged)) == (10, 1)
    (checkpoint_path(directory.checkpoints, 10) / "state.json").unlink()
    with refused("HT-run-checkpoints-lost", at=" at step 20") as e:
        go_on(directory)
    assert e.value.exit_code == 1
    assert checkpoint_path(directory.checkpoints, 20).name in e.value.values["reasons"]


@pytest.mark.parametrize("lost", ["removed", "empty"])
def test_a_run_whose_events_are_lost_goes_on_from_its_checkpoint(directory: RunDirectory, lost: str) -> None:
    if lost == "empty":
        directory.events.touch()
    for iteration in (10, 20):
        checkpoint(directory, iteration)
    assert go_on(directory) == Attempt(iteration=20)
    (checkpoint_path(directory.checkpoints, 20) / "state.json").unlink()
    found = go_on(directory)
    assert found is not None and (found.iteration, len(found.damaged)) == (10, 1)
    (checkpoint_path(directory.checkpoints, 10) / "state.json").unlink()
    with refused("HT-run-checkpoints-lost", at="") as caught:
        go_on(directory)
    assert caught.value.exit_code == 1
    assert re.search(r"step-0+20.*; .*step-0+10", caught.value.values["reasons"])
    for iteration in (10, 20):
        set_aside(checkpoint_path(directory.checkpoints, iteration))
    with refused("HT-run-checkpoints-lost") as caught:
        go_on(directory)
    assert re.search(r"damaged-step-0+10.*; .*damaged-step-0+20", caught.value.values["reasons"])


def test_a_damaged_checkpoint_that_no_event_tells_of(directory: RunDirectory) -> None:
    """The event comes a step later, which a crash can leave out."""
    happened(directory, start(), FAULT, RESUMABLE)
    checkpoint(directory, 10)
    (checkpoint_path(directory.checkpoints, 10) / "rank-0-of-1.safetensors").write_bytes(b"")
    with refused("HT-run-checkpoints-lost", at="") as caught:
        go_on(directory)
    assert caught.value.exit_code == 1
    assert checkpoint_path(directory.checkpoints, 10).name in caught.value.values["reasons"]


def test_a_run_that_gets_no_further_is_refused_with_its_fault(directory: RunDirectory) -> None:
    happened(directory, start(), checkpoint(directory, 10), RESUMABLE)
    for _ in range(4):
        assert go_on(directory) is not None
        happened(directory, start(10), FAULT, RESUMABLE)
    with refused("HT-run-no-progress", attempts=4, iteration=10) as caught:
        go_on(directory)
    assert caught.value.exit_code == 1
    assert FAULT.message in caught.value.values["cause"]
    command = f"hpctrain run --resume --run-dir {shlex.quote(str(directory.path))} --restarts 4"
    assert command in caught.value.hint
    assert go_on(directory, 4) is not None
    # One step further, and it may try again.
    happened(directory, start(10), checkpoint(directory, 11), FAULT, RESUMABLE)
    assert go_on(directory, 0) == Attempt(number=7, iteration=11)


def test_restarts_of_a_launcher_are_none_of_the_resumes_that_are_counted(directory: RunDirectory) -> None:
    for number in range(4):
        assert go_on(directory, script=True) is not None, number
        for restart in range(4):
            happened(directory, start(restart=restart), FAULT)
        happened(directory, RESUMABLE)
    with refused("HT-run-no-progress", attempts=16, iteration=None):
        go_on(directory, 3, script=True)


def test_a_launcher_that_died_and_a_stop_that_saved_nothing_count_too(directory: RunDirectory) -> None:
    happened(directory, start(), RESUMABLE, *[start()] * 3)
    with refused("HT-run-no-progress", attempts=4, iteration=0):
        go_on(directory)
    happened(directory, start())
    with refused("HT-run-no-progress", attempts=4, iteration=None):
        go_on(directory, script=True)


def test_a_script_that_worked_long_got_further(directory: RunDirectory) -> None:
    happened(directory, *[start(), FAULT, RESUMABLE] * 4)
    with refused("HT-run-no-progress", attempts=4, iteration=None) as caught:
        go_on(directory, script=True)
    assert FAULT.message in caught.value.values["cause"]
    lines = [json.loads(line) for line in directory.events.read_text().splitlines()]
    lines[3]["time"] -= 601
    directory.events.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert go_on(directory, script=True) is not None


def test_a_script_that_stops_in_good_order_gets_further(directory: RunDirectory) -> None:
    happened(directory, *[start(), RESUMABLE] * 9)
    assert go_on(directory, script=True) is not None


def test_one_launcher_at_a_time(directory: RunDirectory) -> None:
    with hold_run(directory, {}), refused("HT-run-in-use") as caught, hold_run(directory, {}):
        pass
    assert caught.value.exit_code == 2
    assert caught.value.values["holder"].startswith(f"process {os.getpid()} on ")
    with hold_run(directory, {}):
        pass


def test_a_job_waits_for_the_lock_and_is_no_wrong_use(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_LOCK_SECONDS", 0.1)
    with hold_run(directory, {}):
        for environment, code in (({"SLURM_JOB_ID": "17"}, 1), ({"HPCTRAIN_POD": "digits"}, 4)):
            said: list[str] = []
            with refused("HT-run-in-use") as caught, hold_run(directory, environment, said.append):
                pass
            assert caught.value.exit_code == code
            (line,) = said
            assert f"process {os.getpid()} on " in line and "up to 0.1 s" in line


def nobody(directory: RunDirectory) -> None:
    require_attempt_ended(directory)


def test_ranks_that_outlived_their_launcher(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    me = psutil.Process()
    values = {"rank": 0, "host": socket.gethostname(), "pid": me.pid, "started": me.create_time(), "status": "running"}
    directory.rank(1).write_text('{"rank": ')
    nobody(directory)
    directory.rank(0).write_text(json.dumps(values))
    # A process of any other kind can have been written there.
    nobody(directory)
    with holding(directory), refused("HT-run-still-alive", pids=str(me.pid)) as caught:
        nobody(directory)
    assert caught.value.exit_code == 2 and caught.value.hint.endswith(f"kill {me.pid}")
    directory.rank(0).write_text(json.dumps({**values, "listens": True}))
    # Not wrong use, of which a job would be told.
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with holding(directory), refused("HT-run-still-alive") as caught:
        nobody(directory)
    assert caught.value.exit_code == 1
    assert f"kill {me.pid}, " in caught.value.hint

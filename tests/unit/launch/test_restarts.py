"""Which failures are followed by a restart, and which by the end of the run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_checkpoints import progress_of, write_checkpoint

from hpctrain.cli.main import main
from hpctrain.events import Event, read_events
from hpctrain.launch.failure import Failure
from hpctrain.launch.interrupts import Interrupts
from hpctrain.launch.restarts import Reach, next_restart, wait_seconds
from hpctrain.plan import Plan
from hpctrain.rundir import RunDirectory, read_model

KILLED = Failure(message="rank 1 was killed", exit_code=4)
RAISED = Failure(message="rank 1 failed: RuntimeError", exit_code=1)
REFUSED = Failure(message="rank 1 failed: HpctrainError", exit_code=1, refused=True)
WRONG_USE = Failure(message="rank 1 failed: HpctrainError", exit_code=2)
STOPPED = Failure(message="stopped as asked", exit_code=4, stopped=True)
LOST = Failure(message="host n2 was lost", exit_code=4, lost_hosts=("n2",))

NOTHING, STEP_9, STEP_10 = Reach(), Reach(step=9), Reach(step=10)
SAVED_8, SAVED_10 = Reach(checkpoint=8, step=9), Reach(checkpoint=10, step=12)
SAVED_8_STEP_30 = Reach(checkpoint=8, step=30)


@pytest.mark.parametrize(
    ("failure", "before", "after", "idle", "expected"),
    [
        # the first failure of an attempt that did something
        (KILLED, NOTHING, STEP_9, 0, 1),
        (RAISED, NOTHING, STEP_9, 0, 1),
        (LOST, NOTHING, STEP_9, 0, 1),
        # nothing to hope for
        (STOPPED, NOTHING, STEP_9, 0, None),
        (REFUSED, NOTHING, STEP_9, 0, None),
        (WRONG_USE, NOTHING, STEP_9, 0, None),
        # ahead of the first step of all
        (KILLED, NOTHING, NOTHING, 0, None),
        (RAISED, NOTHING, NOTHING, 0, None),
        (LOST, NOTHING, NOTHING, 0, 1),
        (LOST, NOTHING, NOTHING, 3, None),
        # ahead of the first step of this attempt, where others did some
        (RAISED, STEP_9, STEP_9, 1, 2),
        (RAISED, SAVED_8, SAVED_8, 2, 3),
        # the last one was the third
        (RAISED, STEP_9, STEP_9, 3, None),
        (RAISED, SAVED_8, SAVED_8, 3, None),
        # a step further than ever counts until there is a checkpoint, a checkpoint always
        (RAISED, STEP_9, STEP_10, 3, 1),
        (RAISED, SAVED_8, SAVED_8_STEP_30, 3, None),
        (RAISED, SAVED_8, SAVED_10, 3, 1),
        (RAISED, STEP_10, SAVED_8, 3, 1),
        # the newest checkpoint turned out damaged
        (RAISED, SAVED_10, SAVED_8, 1, 2),
    ],
)
def test_decisions(failure: Failure, before: Reach, after: Reach, idle: int, expected: int | None) -> None:
    assert next_restart(failure, before, after, idle=idle, limit=3) == expected


reaches = st.builds(Reach, checkpoint=st.integers(0, 5), step=st.integers(0, 20))


@given(st.lists(reaches, min_size=1, max_size=40), st.integers(0, 4))
def test_a_run_is_restarted_as_often_as_allowed_in_a_row(course: list[Reach], limit: int) -> None:
    """Whatever its attempts reach, there are never more restarts in a row than the limit without progress between."""
    before, idle, in_a_row = Reach(), 0, 0
    for after in course:
        number = next_restart(LOST, before, after, idle=idle, limit=limit)
        in_a_row = 1 if after.is_beyond(before) else in_a_row + 1
        assert (number is None) == (in_a_row > limit)
        if number is None:
            return
        assert number == in_a_row
        before, idle = after, number


def test_waits_double_up_to_a_minute() -> None:
    assert [wait_seconds(number) for number in (1, 2, 3, 6, 7, 8, 2000)] == [1, 2, 4, 32, 60, 60, 60]


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


# Each start takes one of the ways to end that are left, a line each.
SCRIPT = """
import os, signal, sys
from pathlib import Path
from hpctrain.errors import HpctrainError, TransientError

print("started", flush=True)
ways = Path("ways").read_text().split()
Path("ways").write_text(" ".join(ways[1:]))
match ways[0]:
    case "raise": raise ValueError("boom")
    case "kill": os.kill(os.getpid(), signal.SIGKILL)
    case "refuse": raise HpctrainError("no such data", exit_code=1)
    case "transient": raise TransientError("a flipped bit", exit_code=1)
    case "stop": os.kill(os.getpid(), signal.SIGUSR2); sys.exit(4)
    case "done": pass
"""


def events(*kinds: str) -> list[Event]:
    return [event for event in read_events(Path("run/events.jsonl")) if event["event"] in kinds]


@pytest.fixture
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.launch.supervision.wait_seconds", lambda number: 0.0)


@pytest.mark.usefixtures("_no_waits")
@pytest.mark.parametrize(
    ("options", "ways", "exit_code", "starts"),
    [
        (["--restarts", "3"], "raise kill transient done", 0, 4),
        (["--restarts", "2"], "raise kill raise done", 1, 3),
        (["--restarts", "3"], "raise refuse done", 1, 2),
        (["--restarts", "3"], "kill stop done", 4, 2),
        (["--restarts", "0"], "kill done", 4, 1),
        # a script may not be able to go on
        ([], "kill done", 4, 1),
    ],
)
def test_a_script(
    options: list[str], ways: str, exit_code: int, starts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text(SCRIPT)
    Path("ways").write_text(ways)
    assert main(["run", "train.py", "--run-dir", "run", *options]) == exit_code
    assert [event["restart"] for event in events("start")] == list(range(starts))
    # Each failure once, and the end of the run alone.
    last = ways.split()[starts - 1]
    assert len(events("fault")) == starts - (last in ("done", "stop"))
    assert [event["status"] for event in events("end")] == [{0: "done", 1: "failed", 4: "resumable"}[exit_code]]
    said = capsys.readouterr().err
    assert said.count("going on from step 0 with 1 of 1 ranks") == starts - 1
    if starts > 1:
        assert f"in 0 s (restart 1 of {options[1]})" in said


@pytest.mark.usefixtures("_no_waits")
def test_restarts_are_none_of_the_resumes_that_are_counted() -> None:
    Path("train.py").write_text(SCRIPT)
    Path("ways").write_text("kill " * 20)
    assert main(["run", "train.py", "--run-dir", "run", "--restarts", "3", "--idle-restarts", "1"]) == 4
    assert main(["run", "--resume", "--run-dir", "run"]) == 4
    assert main(["run", "--resume", "--run-dir", "run"]) == 1
    assert [event["restart"] for event in events("start")] == [0, 1, 2, 3] * 2
    assert read_model(RunDirectory(Path("run")).plan, Plan).restarts == 3


def test_a_signal_ends_the_wait() -> None:
    """Behind a failure that would have been followed by a restart: the run can be resumed."""
    Path("train.py").write_text(SCRIPT)
    Path("ways").write_text("raise raise raise done")
    program = "import sys; from hpctrain.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "run", "train.py", "--run-dir", "run", "--restarts", "9"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert any("in 2 s (restart 2 of 9)" in line for line in process.stderr)
            process.send_signal(signal.SIGTERM)
            said = process.stderr.read()
            assert process.wait(timeout=30) == 4
        finally:
            process.kill()
    assert "interrupted by SIGTERM before it was started again" in said
    assert "to go on: hpctrain run --resume --run-dir run" in said
    assert json.loads(Path("run/summary.json").read_text())["status"] == "resumable"
    assert len(events("start")) == 2


def test_interrupts_end_a_wait() -> None:
    with Interrupts() as interrupts:
        assert interrupts.wait(0.01)
        signal.raise_signal(signal.SIGUSR1)
        begin = time.monotonic()
        assert not interrupts.wait(600)
        assert time.monotonic() - begin < 60


def test_a_damaged_checkpoint_is_set_aside_once_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(SCRIPT)
    Path("ways").write_text("kill done")
    assert main(["run", "train.py", "--run-dir", "run"]) == 4
    good, bad = (write_checkpoint(Path("run/checkpoints"), progress_of(iteration), {}) for iteration in (10, 20))
    (bad / "state.json").write_text("{")
    resume = ["run", "--resume", "--run-dir", "run"]
    assert main([*resume, "--dry-run"]) == 0
    assert f"{bad} is damaged, and would be passed over: " in capsys.readouterr().err
    assert (sorted(good.parent.iterdir()), events("damaged")) == ([good, bad], [])
    assert main(resume) == 0
    (told,) = events("damaged")
    assert f"{bad} is damaged, and passed over: {told['fault']}; it is now " in capsys.readouterr().err
    assert told["path"] == bad.name
    assert sorted(path.name for path in good.parent.iterdir()) == sorted([good.name, told["kept_as"]])
    assert [event["iteration"] for event in events("start")] == [0, 10]
    assert "state.json" in told["fault"]

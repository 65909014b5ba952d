"""Which failures are followed by a restart, and which by the end of the run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cli.main import main
from hpctrain.common.cluster.machine import this_machine
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.events import EventWriter, read_events
from hpctrain.common.run.events.kinds import StallEvent, StartEvent, StepEvent
from hpctrain.common.run.plan import Plan, Script, Stop
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.planning.planner import make_plan
from hpctrain.control.resuming.attempts import Attempt
from hpctrain.control.supervision.audience import ReadyRun
from hpctrain.control.supervision.execution import Reach, Restart, Supervisor, next_restart, wait_seconds
from hpctrain.control.supervision.failure import Failure
from hpctrain.control.supervision.interrupts import Interrupts
from support import needs
from support.written_checkpoints import progress_of, write_checkpoint

RESTART = r"in (\d+) s \(restart (\d+)\D+(\d+)\)"
KILLED = Failure(code="HT-rank-killed", message="rank 1 was killed", exit_code=4)
RAISED = Failure(code="HT-rank-exception", message="rank 1 failed: RuntimeError", exit_code=1)
REFUSED = Failure(code="HT-rank-exception", message="rank 1 failed: HpctrainError", exit_code=1, refused=True)
WRONG_USE = Failure(code="HT-rank-exception", message="rank 1 failed: HpctrainError", exit_code=2)
STOPPED = Failure(code="HT-rank-exception", message="stopped as asked", exit_code=4, stopped=True)
LOST = Failure(code="HT-rank-exception", message="host n2 was lost", exit_code=4, lost_hosts=("n2",))
PASSING = Failure(
    code="HT-rank-exception", message="rank 0, 1 did not finish; exit status 213", exit_code=1, passing=True
)

NOTHING, STEP_9, STEP_10 = Reach(), Reach(step=9), Reach(step=10)
SAVED_8, SAVED_10 = Reach(checkpoint=8, step=9), Reach(checkpoint=10, step=12)
SAVED_8_STEP_30 = Reach(checkpoint=8, step=30)


@pytest.mark.parametrize(
    ("failure", "before", "after", "stepped", "idle", "expected"),
    [
        # the first failure of an attempt that did something
        (KILLED, NOTHING, STEP_9, True, 0, 1),
        (RAISED, NOTHING, STEP_9, True, 0, 1),
        (LOST, NOTHING, STEP_9, True, 0, 1),
        # nothing to hope for
        (STOPPED, NOTHING, STEP_9, True, 0, None),
        (REFUSED, NOTHING, STEP_9, True, 0, None),
        (WRONG_USE, NOTHING, STEP_9, True, 0, None),
        # ahead of the first step of all
        (KILLED, NOTHING, NOTHING, False, 0, None),
        (RAISED, NOTHING, NOTHING, False, 0, None),
        (LOST, NOTHING, NOTHING, False, 0, 1),
        (LOST, NOTHING, NOTHING, False, 3, None),
        (PASSING, NOTHING, NOTHING, False, 0, 1),
        (PASSING, NOTHING, NOTHING, False, 3, None),
        # ahead of the first step of this attempt, where others did some
        (RAISED, STEP_9, STEP_9, False, 0, None),
        (RAISED, SAVED_8, SAVED_8, False, 0, None),
        (KILLED, STEP_9, STEP_9, False, 1, 2),
        (KILLED, SAVED_8, SAVED_8, False, 2, 3),
        (LOST, SAVED_8, SAVED_8, False, 0, 1),
        # no further than others
        (RAISED, STEP_9, STEP_9, True, 1, 2),
        (RAISED, SAVED_8, SAVED_8, True, 2, 3),
        # the last one was the third
        (RAISED, STEP_9, STEP_9, True, 3, None),
        (RAISED, SAVED_8, SAVED_8, True, 3, None),
        # a step further than ever counts until there is a checkpoint, a checkpoint always
        (RAISED, STEP_9, STEP_10, True, 3, 1),
        (RAISED, SAVED_8, SAVED_8_STEP_30, True, 3, None),
        (RAISED, SAVED_8, SAVED_10, True, 3, 1),
        (RAISED, STEP_10, SAVED_8, True, 3, 1),
        # the newest checkpoint turned out damaged
        (RAISED, SAVED_10, SAVED_8, True, 1, 2),
    ],
)
def test_decisions(
    failure: Failure, before: Reach, after: Reach, stepped: bool, idle: int, expected: int | None
) -> None:
    assert next_restart(failure, before, after, stepped=stepped, idle=idle, limit=3) == expected


@pytest.mark.parametrize(("failure", "idle", "expected"), [(KILLED, 0, 1), (KILLED, 3, None), (RAISED, 0, None)])
def test_a_rank_that_is_lost_at_the_start_may_have_gone_with_its_host(
    failure: Failure, idle: int, expected: int | None
) -> None:
    """Nobody may have told of the host: mpirun sees a rank's end first."""
    assert next_restart(failure, NOTHING, NOTHING, stepped=False, idle=idle, limit=3, hosts=2) == expected


reaches = st.builds(Reach, checkpoint=st.integers(0, 5), step=st.integers(0, 20))


@given(st.lists(reaches, min_size=1, max_size=40), st.integers(0, 4))
def test_a_run_is_restarted_as_often_as_allowed_in_a_row(course: list[Reach], limit: int) -> None:
    """Whatever its attempts reach, there are never more restarts in a row than the limit without progress between."""
    before, idle, in_a_row = Reach(), 0, 0
    for after in course:
        number = next_restart(LOST, before, after, stepped=False, idle=idle, limit=limit)
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
from hpctrain.common.errors import HpctrainError, TransientError

print("started", flush=True)
ways = Path("ways").read_text().split()
Path("ways").write_text(" ".join(ways[1:]))
match ways[0]:
    case "raise": raise ValueError("boom")
    case "kill": os.kill(os.getpid(), signal.SIGKILL)
    case "refuse": raise HpctrainError("HT-of-test", "no such data", exit_code=1)
    case "transient": raise TransientError("HT-of-test", "a flipped bit", exit_code=1)
    case "stop": os.kill(os.getpid(), signal.SIGUSR2); sys.exit(4)
    case "done": pass
"""


def events(*kinds: str) -> list[Any]:
    return [event for event in read_events(Path("run/events.jsonl")) if event.event in kinds]


@pytest.fixture
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.control.supervision.execution.wait_seconds", lambda number: 0.0)


@pytest.mark.long
@pytest.mark.slow
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
    assert [event.restart for event in events("start")] == list(range(starts))
    # Each failure once, and the end of the run alone.
    last = ways.split()[starts - 1]
    assert len(events("fault")) == starts - (last in ("done", "stop"))
    assert [event.status for event in events("end")] == [{0: "done", 1: "failed", 4: "resumable"}[exit_code]]
    said = capsys.readouterr().err
    ranks = " 1 of 1 "
    assert said.count(ranks) == starts - 1
    if starts > 1:
        assert ("0", "1", options[1]) in re.findall(RESTART, said)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_no_waits")
def test_restarts_are_none_of_the_resumes_that_are_counted() -> None:
    Path("train.py").write_text(SCRIPT)
    Path("ways").write_text("kill " * 20)
    assert main(["run", "train.py", "--run-dir", "run", "--restarts", "3", "--idle-restarts", "1"]) == 4
    assert main(["run", "--resume", "--run-dir", "run"]) == 4
    assert main(["run", "--resume", "--run-dir", "run"]) == 1
    assert [event.restart for event in events("start")] == [0, 1, 2, 3] * 2
    assert read_model(RunDirectory(Path("run")).plan, Plan).restarts == 3


@pytest.mark.slow
def test_a_signal_ends_the_wait() -> None:
    """After a failure that would have been followed by a restart: the run can be resumed."""
    Path("train.py").write_text(SCRIPT)
    Path("ways").write_text("raise raise raise done")
    program = "import sys; from hpctrain.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "run", "train.py", "--run-dir", "run", "--restarts", "9"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert any(("2", "2", "9") in re.findall(RESTART, line) for line in process.stderr)
            process.send_signal(signal.SIGTERM)
            said = process.stderr.read()
            assert process.wait(timeout=30) == 4
        finally:
            process.kill()
    command = "hpctrain run --resume --run-dir run"
    assert "SIGTERM before" in said and f": {command}" in said
    assert json.loads(Path("run/summary.json").read_text())["status"] == "resumable"
    assert len(events("start")) == 2


@pytest.mark.usefixtures("_no_waits")
@pytest.mark.parametrize(("restarts", "exit_code"), [("0", 1), ("2", 4)])
def test_a_script_that_may_be_started_again_can_be_resumed(restarts: str, exit_code: int) -> None:
    """Whether it is interrupted while it works, without listening, or, as above, in between."""
    Path("train.py").write_text("import os, signal, time\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(600)\n")
    assert main(["run", "train.py", "--run-dir", "run", "--restarts", restarts]) == exit_code
    assert [event.status for event in events("end")] == ["failed" if exit_code == 1 else "resumable"]


@pytest.mark.slow
@pytest.mark.usefixtures("_no_waits")
@pytest.mark.parametrize("way", ["kill", "raise"])
def test_a_signal_while_it_is_looked_for_what_follows(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the comparison of hashes and the questions to hosts, which take long."""
    Path("train.py").write_text(SCRIPT)
    Path("ways").write_text(f"{way} done")

    def look(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("went on looking")

    monkeypatch.setattr("hpctrain.control.supervision.execution.attempt_from_here", look)
    assert main(["run", "train.py", "--run-dir", "run", "--restarts", "2"]) == 4
    assert " SIGTERM before " in events("fault")[0].message
    assert len(events("start")) == len(events("end")) == 1


@pytest.mark.usefixtures("_no_waits")
def test_a_run_whose_checkpoints_are_all_damaged_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    """Though a killed rank alone could be resumed from."""
    Path("train.py").write_text(SCRIPT)
    Path("ways").write_text("kill done")
    path = Path("run/checkpoints/step-00000010").absolute()
    Path("train.py").write_text(f"import os\nos.makedirs({str(path)!r})\n" + SCRIPT)
    assert main(["run", "train.py", "--run-dir", "run", "--restarts", "2"]) == 1
    said = capsys.readouterr().err
    assert f"{path.name}/state.json" in said
    assert "--run-dir" in said
    assert "to go" not in said
    (fault,) = events("fault")
    assert " signal 9" in fault.message and f"{path.name}/state.json" in fault.message
    assert json.loads(Path("run/summary.json").read_text())["status"] == "failed"


STEP = StepEvent(
    iteration=11, epoch=1, loss=1.0, learning_rate=0.1, samples=64, seconds=0.1, communication_seconds=None
)


@pytest.fixture
def supervised() -> tuple[Supervisor, ReadyRun]:
    """A second attempt that began at a checkpoint."""
    directory, machine = RunDirectory(Path("run")), this_machine()
    begun = make_plan(TrainingRequest(work=load_recipe("digits"), ranks=1, backend="single"), machine)
    directory.create(begun)
    with EventWriter(directory.events) as writer:
        writer.emit(StartEvent(attempt=1, iteration=0))
    write_checkpoint(directory.checkpoints, progress_of(10), {}, plan=begun.model_dump(mode="json"))
    run = ReadyRun(plan=begun, machine=machine, launcher=None, attempt=Attempt(number=2, iteration=10))
    supervisor = Supervisor(run, directory, lambda text: None)
    supervisor.record(StartEvent(attempt=2, iteration=10))
    return supervisor, run


@needs.pytorch
def test_what_fails_ahead_of_its_first_step(supervised: tuple[Supervisor, ReadyRun]) -> None:
    """In an attempt that goes on: as an import that fails, which it will do again."""
    supervisor, run = supervised
    assert supervisor.next_step(RAISED, run) == RAISED
    assert isinstance(supervisor.next_step(KILLED, run), Restart)
    supervisor.record(STEP)
    assert isinstance(supervisor.next_step(RAISED, run), Restart)
    supervisor.record(StartEvent(attempt=2, iteration=10))
    assert supervisor.next_step(RAISED, run) == RAISED


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("stalled", "expected"), [(None, 1), (700.0, None)])
def test_a_script_that_worked_for_long_made_progress_and_one_that_hung_did_not(
    stalled: float | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt of 1,000 s, after as many restarts as are allowed in a row."""
    clock = Clock()
    monkeypatch.setattr("hpctrain.control.supervision.execution.time", clock)
    directory, plan = RunDirectory(Path("run")), script_plan(restarts=1)
    directory.create(plan)
    with EventWriter(directory.events) as writer:
        writer.emit(StartEvent(attempt=1, iteration=0))
    attempt = Attempt(number=2, restart=1)
    run = ReadyRun(plan=plan, machine=this_machine(), launcher=None, attempt=attempt)
    supervisor = Supervisor(run, directory, lambda text: None)
    supervisor.record(StartEvent(attempt=2, iteration=0))
    clock.now = 1000.0
    if stalled:
        supervisor.record(StallEvent(rank=1, host="n2", waiting_for="step 1", seconds=stalled))
    further = supervisor.next_step(KILLED, run)
    assert (further.run.attempt.restart if isinstance(further, Restart) else None) == expected


def script_plan(restarts: int) -> Plan:
    Path("train.py").touch()
    return Plan(
        script=Script(path=Path("train.py")),
        backend="single",
        ranks=1,
        stop=Stop(restarts=restarts),
        threads_per_rank=1,
    )


def test_interrupts_end_a_wait() -> None:
    with Interrupts() as interrupts:
        assert interrupts.wait(0.01)
        signal.raise_signal(signal.SIGUSR1)
        begin = time.monotonic()
        assert not interrupts.wait(600)
        assert time.monotonic() - begin < 60


@pytest.mark.slow
def test_a_damaged_checkpoint_is_set_aside_once_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(SCRIPT)
    Path("ways").write_text("kill done")
    assert main(["run", "train.py", "--run-dir", "run"]) == 4
    good, bad = (write_checkpoint(Path("run/checkpoints"), progress_of(iteration), {}) for iteration in (10, 20))
    (bad / "state.json").write_text("{")
    resume = ["run", "--resume", "--run-dir", "run"]
    assert main([*resume, "--dry-run"]) == 0
    assert f"warning: {bad} is" in capsys.readouterr().err
    assert (sorted(good.parent.iterdir()), events("damaged")) == ([good, bad], [])
    assert main(resume) == 0
    (told,) = events("damaged")
    said = capsys.readouterr().err
    assert f"warning: {bad} is" in said and f" {told.fault}; " in said
    assert told.path == bad.name
    assert sorted(path.name for path in good.parent.iterdir()) == sorted([good.name, told.kept_as])
    assert [event.iteration for event in events("start")] == [0, 10]
    assert "state.json" in told.fault

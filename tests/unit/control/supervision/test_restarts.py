"""Which failures are followed by a restart, and which by the end of the run."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli.main import main
from hpctrain.common.cluster.machine import this_machine
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventWriter, read_events
from hpctrain.common.run.events.kinds import StallEvent, StartEvent, StepEvent
from hpctrain.common.run.plan import Plan, Script, Stop
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.planning.planner import make_plan
from hpctrain.control.resuming.attempts import Attempt
from hpctrain.control.supervision.audience import Audience, LiveRun, ReadyRun
from hpctrain.control.supervision.execution import Execution, next_restart, wait_seconds
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


@pytest.mark.parametrize(
    ("failure", "stepped", "worked", "hosts", "goes_on"),
    [
        # an attempt that did something
        (KILLED, True, True, 1, True),
        (RAISED, True, True, 1, True),
        (LOST, True, True, 1, True),
        # nothing to hope for
        (STOPPED, True, True, 1, False),
        (REFUSED, True, True, 1, False),
        (WRONG_USE, True, True, 1, False),
        # ahead of the first step of all
        (KILLED, False, False, 1, False),
        (RAISED, False, False, 1, False),
        (LOST, False, False, 1, True),
        (PASSING, False, False, 1, True),
        # ahead of the first step of this attempt, where others did some
        (RAISED, False, True, 1, False),
        (KILLED, False, True, 1, True),
        # nobody may have told of the host: mpirun sees a rank's end first
        (KILLED, False, False, 2, True),
        (RAISED, False, False, 2, False),
    ],
)
def test_decisions(failure: Failure, stepped: bool, worked: bool, hosts: int, goes_on: bool) -> None:
    numbers = [
        next_restart(failure, stepped=stepped, worked=worked, idle=idle, limit=3, hosts=hosts) for idle in range(5)
    ]
    assert numbers == ([1, 2, 3, None, None] if goes_on else [None] * 5)


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
        (["--restarts", "3"], "raise refuse done", 1, 2),
        (["--restarts", "3"], "kill stop done", 4, 2),
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


@pytest.mark.usefixtures("_no_waits")
@pytest.mark.parametrize(("restarts", "exit_code"), [("0", 1), ("2", 4)])
def test_a_script_that_may_be_started_again_can_be_resumed(restarts: str, exit_code: int) -> None:
    """Where it is interrupted while it works, without listening."""
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
def supervised() -> Execution:
    directory, run = second_attempt()
    return execution_of(run, directory)


def second_attempt(restart: int = 0) -> tuple[RunDirectory, ReadyRun]:
    """A second attempt that began at a checkpoint."""
    directory, machine = RunDirectory(Path("run")), this_machine()
    begun = make_plan(TrainingRequest(work=load_recipe("digits"), ranks=1, backend="single"), machine)
    directory.create(begun)
    with EventWriter(directory.events) as writer:
        writer.emit(StartEvent(attempt=1, iteration=0))
        writer.emit(StartEvent(attempt=2, iteration=10))
    write_checkpoint(directory.checkpoints, progress_of(10), {}, plan=begun.model_dump(mode="json"))
    run = ReadyRun(plan=begun, machine=machine, launcher=None, attempt=Attempt(number=2, iteration=10, restart=restart))
    return directory, run


def execution_of(run: ReadyRun, directory: RunDirectory) -> Execution:
    live = LiveRun(directory=directory, interrupts=Interrupts(), audience=Audience())
    return Execution(run, live, lambda directory, plan, status: {})


@needs.pytorch
def test_what_fails_ahead_of_its_first_step(supervised: Execution) -> None:
    """In an attempt that goes on: as an import that fails, which it will do again."""
    assert supervised.next_run(RAISED) == RAISED
    assert isinstance(supervised.next_run(KILLED), ReadyRun)
    supervised.show(STEP)
    assert isinstance(supervised.next_run(RAISED), ReadyRun)
    supervised.show(StartEvent(attempt=2, iteration=10))
    assert supervised.next_run(RAISED) == RAISED


@needs.pytorch
def test_a_checkpoint_is_progress() -> None:
    """After as many restarts as are allowed in a row."""
    directory, run = second_attempt(restart=3)
    execution = execution_of(run, directory)
    execution.show(STEP)
    assert execution.next_run(RAISED) == RAISED
    write_checkpoint(directory.checkpoints, progress_of(11), {}, plan=run.plan.model_dump(mode="json"))
    further = execution.next_run(RAISED)
    assert isinstance(further, ReadyRun) and (further.attempt.restart, further.attempt.iteration) == (1, 11)


@pytest.mark.parametrize(("stalled", "expected"), [(None, 1), (700.0, None)])
def test_a_script_that_worked_for_long_made_progress_and_one_that_hung_did_not(
    stalled: float | None, expected: int | None
) -> None:
    """An attempt of 1,000 s, after as many restarts as are allowed in a row."""
    directory, plan = RunDirectory(Path("run")), script_plan(restarts=1)
    directory.create(plan)
    stall = StallEvent(rank=1, host="n2", waiting_for="step 1", seconds=stalled or 0.0)
    with EventWriter(directory.events) as writer:
        writer.emit(StartEvent(attempt=1, iteration=0, time=time.time() - 1000))
        if stalled:
            writer.emit(stall)
    run = ReadyRun(plan=plan, machine=this_machine(), launcher=None, attempt=Attempt(number=2, restart=1))
    further = execution_of(run, directory).next_run(KILLED)
    assert (further.attempt.restart if isinstance(further, ReadyRun) else None) == expected


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

"""Following and ending processes; small programs stand in for a launcher and its ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events.kinds import StartEvent
from hpctrain.common.run.plan import Plan, Script, Stop
from hpctrain.common.run.records import holding, read_records
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.control.launchers import processes
from hpctrain.control.launchers.command import Command
from hpctrain.control.supervision import running_job
from hpctrain.control.supervision.audience import Audience, LiveRun
from hpctrain.control.supervision.failure import Failure
from hpctrain.control.supervision.interrupts import Interrupted, Interrupts
from hpctrain.control.supervision.running_job import run_ranks
from support.refusals import refused
from support.script_runs import script_run

# A rank's record, written by the program itself so that pid and start are real. It holds the directory as ranks do.
RECORD = """
import json, os, psutil, signal, socket, subprocess, sys, time
held = os.open(".", os.O_RDONLY)
named = {}
def record(rank, status, pid=None, **more):
    # At its end a rank's process is the one that was running, which may be dead.
    if status == "running" or rank not in named:
        process = psutil.Process(pid)
        named[rank] = dict(pid=process.pid, started=process.create_time())
    values = dict(rank=rank, host=socket.gethostname(), status=status, **named[rank])
    path = f"ranks/rank-{rank}.json"
    with open(path + ".new", "w") as file:
        json.dump({**values, **more}, file)
    os.replace(path + ".new", path)
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    made = script_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    return made


def start(
    directory: RunDirectory,
    program: str,
    ranks: int = 1,
    *,
    recipe: Recipe | None = None,
    stop_seconds: float = 60.0,
    notice: Callable[[str], None] = lambda text: None,
) -> tuple[Failure | None, list[str], list[str]]:
    shown: list[str] = []
    printed: list[str] = []
    plan = Plan(
        recipe=recipe,
        script=None if recipe else Script(path=Path("train.py")),
        ranks=ranks,
        stop=Stop(seconds=stop_seconds),
        threads_per_rank=1,
    )
    audience = Audience(
        show=lambda event: shown.append(event.event),
        output=printed.append,
        notice=notice,
    )
    command = Command(program=(sys.executable, "-c", RECORD + program))
    failure = run(command, directory, plan, audience)
    return failure, shown, "".join(printed).splitlines()


def failed(directory: RunDirectory, program: str, ranks: int = 1, **more: Any) -> Failure:
    """How a program fails."""
    failure, _, _ = start(directory, program, ranks, **more)
    assert failure is not None
    return failure


def run(
    command: Command,
    directory: RunDirectory,
    plan: Plan,
    audience: Audience = Audience(),
) -> Failure | None:
    with Interrupts() as interrupts, holding(directory):
        live = LiveRun(directory=directory, interrupts=interrupts, audience=audience)
        return run_ranks(command, live, plan, StartEvent(attempt=1, iteration=0))


def test_what_is_written_is_passed_on(directory: RunDirectory) -> None:
    failure, shown, lines = start(
        directory,
        """
log = open("logs/rank-0.log", "wb", buffering=0)
events = open("events.jsonl", "ab", buffering=0)
log.write(b"one\\ntw"); events.write(b'{"time": 1, "event": "mark"}\\n{"time": 2, ')
time.sleep(0.3)
log.write(b"o\\nend without newline"); events.write(b'"event": "end", "status": "done"}\\n{"time": 3, "ev')
record(0, "done")
""",
    )
    assert failure is None
    last = "end without newline"
    assert lines == ["one", "two", last]
    assert shown == ["start", "mark", "end"]


@pytest.mark.slow
def test_ranks_that_outlive_their_launcher_are_ended(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the launcher was killed: its ranks are nobody's children any more, and they ignore SIGTERM."""
    monkeypatch.setattr(processes, "_TERMINATE_SECONDS", 0.5)
    failed(
        directory,
        """
stubborn = "import os, signal, time; held = os.open('.', os.O_RDONLY); "
stubborn += "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
for rank in range(2):
    child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, start_new_session=True)
    child.stdout.readline()
    record(rank, "running", child.pid)
os._exit(0)
""",
        ranks=2,
    )
    records = read_records(directory)
    assert len(records) == 2
    assert [record.process() for record in records.values()] == [None, None]


def test_a_process_that_is_no_rank_is_not_ended(directory: RunDirectory) -> None:
    """A record of somebody else's, with a process of this user's own."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        error = {"type": "E", "message": "x"}
        program = f"record(0, 'failed', error={error}, exit_code=1)\nrecord(1, 'running', {other.pid})"
        failed(directory, program, ranks=2)
        assert read_records(directory)[1].process() is not None
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def digits(lost_rank: str) -> Recipe:
    return load_recipe("digits", [f"fault_tolerance.lost_rank={lost_rank}"])


class Clock:
    """The launcher's time: it stands still until the program makes the file ``go``, and then each look takes 0.6 s."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        if Path("go").exists():
            self._now += 0.6
        return self._now


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_job, "time", Clock())


@pytest.mark.slow
@pytest.mark.usefixtures("_clock")
@pytest.mark.parametrize("lost_rank", ["stop", "shrink"])
@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("", "rank 0, 1 did not begin within 1 s"),
        ('record(1, "running")', "rank 0 did not begin within 1 s"),
        ('record(0, "running"); record(1, "running")', "the ranks did not find each other within 1 s"),
    ],
)
def test_ranks_that_wait_for_others_at_their_start_have_a_limit(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, program: str, message: str, lost_rank: str
) -> None:
    """As in MPI_Init, which waits for a host that is cut off for ever."""
    program += "\nopen('go', 'w').close(); time.sleep(600)"
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "1")
    failure = failed(directory, program, ranks=2, recipe=digits(lost_rank))
    assert (failure.message, failure.exit_code, failure.passing) == (message, 4, True)


@pytest.mark.slow
@pytest.mark.usefixtures("_clock")
def test_ranks_that_have_met_may_take_their_time(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "0.5")
    program = """
record(0, "running", joined=True); record(1, "running")
open("go", "w").close()
time.sleep(2.5)
record(0, "done"); record(1, "done")
"""
    failure, _, _ = start(directory, program, ranks=2, recipe=digits("stop"))
    assert failure is None


@pytest.mark.slow
def test_what_a_rank_left_behind_is_ended(directory: RunDirectory) -> None:
    """No record names it, and it is nobody's child any more: only its session tells whose it is."""
    failure, _, _ = start(
        directory,
        """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("left.pid", "w").write(str(child.pid))
record(0, "done")
""",
    )
    assert failure is None
    left = int(Path("left.pid").read_text())
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("at_the_end", [True, False])
def test_a_record_that_cannot_be_read_ends_no_run(directory: RunDirectory, at_the_end: bool) -> None:
    failure, _, _ = start(
        directory,
        f"""
record(0, "done")
record(1, "running")
open("ranks/rank-1.json", "w").write("{{")
time.sleep(1.5)
{at_the_end} or record(1, "done")
""",
        ranks=2,
    )
    if at_the_end:
        assert failure and failure.exit_code == RESUMABLE and "ranks/rank-1.json" in failure.message
    else:
        assert failure is None


FAILED = """
record(1, "failed", ended=time.time(), exit_code=1, error={"type": "ValueError", "message": "boom"})
record(0, "running")
"""
KILLED = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
record(1, "running", child.pid)
record(0, "running")
child.kill()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("program", "code"), [(FAILED, "HT-rank-exception"), (KILLED, "HT-rank-died")])
def test_ranks_that_wait_for_one_that_failed_or_died_are_ended(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, program: str, code: str
) -> None:
    """Where the launcher itself takes no notice."""
    monkeypatch.setattr(running_job, "_FAILURE_GRACE_SECONDS", 0.2)
    failure = failed(directory, f"{program}time.sleep(600)", ranks=2)
    assert (failure.code, failure.rank, failure.host) == (code, 1, socket.gethostname())


@pytest.mark.slow
def test_ranks_that_heal_are_left_to_it(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than ranks have that are not fault-tolerant, after which they would be ended."""
    monkeypatch.setattr(running_job, "_FAILURE_GRACE_SECONDS", 0.0)
    failure, _, _ = start(
        directory,
        """
record(0, "running")
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
record(1, "running", child.pid)
kept = open("ranks/rank-1.json").read()
child.kill(); child.wait()
time.sleep(2)
open("ranks/rank-1.json", "w").write(kept.replace("running", "lost"))
record(0, "done")
sys.exit(137)
""",
        ranks=2,
        recipe=digits("shrink"),
    )
    assert failure is None


def test_a_process_number_used_again_is_left_alone(directory: RunDirectory) -> None:
    """The record names a pid that now belongs to somebody else: to this very test."""
    me = psutil.Process()
    values = {"rank": 0, "host": socket.gethostname(), "pid": me.pid, "started": me.create_time() - 60}
    directory.rank(0).write_text(json.dumps({**values, "status": "running"}))
    assert read_records(directory)[0].process() is None
    directory.rank(0).write_text(json.dumps({**values, "started": me.create_time(), "status": "running"}))
    assert read_records(directory)[0].process() == me
    directory.rank(0).write_text(json.dumps({**values, "started": me.create_time(), "host": "x", "status": "running"}))
    assert read_records(directory)[0].process() is None


@pytest.mark.parametrize("what", ["a", "w"])
def test_events_that_are_damaged_or_lost_end_no_run(directory: RunDirectory, what: str) -> None:
    failure, shown, _ = start(
        directory,
        f"""
record(0, "running")
open("events.jsonl", "{what}").write("nonsense\\n")
time.sleep(0.3)
open("events.jsonl", "a").write('{{"time": 3, "event": "stopped", "iteration": 1, "reason": "x"}}\\n')
record(0, "done")
""",
    )
    assert failure is None
    assert shown[-1] == "stopped"


def test_interrupts_are_collected_and_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    # the tests themselves may run under nohup, which ignores it
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0)
    finally:
        signal.signal(signal.SIGHUP, hangup)
    assert interrupts.received == [signal.SIGTERM, signal.SIGHUP]
    assert signal.getsignal(signal.SIGTERM) is before


def test_nohup_is_respected() -> None:
    program = (
        "import os, signal; from hpctrain.control.supervision.interrupts import Interrupts\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "with Interrupts() as interrupts: os.kill(os.getpid(), signal.SIGHUP)\n"
        "print(interrupts.received)"
    )
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize(
    "begin", ["signal.signal(signal.SIGTERM, signal.SIG_IGN)", "signal.pthread_sigmask(signal.SIG_BLOCK, {15})"]
)
def test_a_run_can_be_cancelled_whoever_started_it(begin: str) -> None:
    program = (
        "import os, signal, subprocess, sys; from hpctrain.control.supervision.interrupts import Interrupts\n"
        f"{begin}\n"
        "with Interrupts() as interrupts:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    # A program that it starts listens, too.\n"
        "    child = subprocess.Popen(['sleep', '60'])\n"
        "    child.terminate()\n"
        "    print(len(interrupts.received), child.wait(30))"
    )
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert result.stdout == "1 -15\n"


def test_a_signal_before_the_ranks_is_raised() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(Interrupted) as first, interrupts.raised():
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted) as again, interrupts.raised():
            pytest.fail("the one that came before")
    assert "SIGTERM" in str(first.value) and "SIGTERM" in str(again.value)


def test_a_program_that_is_not_there(directory: RunDirectory) -> None:
    with refused("HT-launcher-not-started", program="/nope/python"):
        plan = Plan(script=Script(path=Path("train.py")), ranks=1, threads_per_rank=1)
        run(Command(program=("/nope/python",)), directory, plan)


@pytest.mark.slow
@pytest.mark.parametrize("status", ["done", "resumable"])
def test_ranks_that_do_not_leave_mpi(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    monkeypatch.setattr(running_job, "_FINALIZE_SECONDS", 0.2)
    failure, _, _ = start(directory, f"record(0, {status!r})\ntime.sleep(600)")
    assert (failure and (failure.code, failure.exit_code)) == (("HT-run-stopped", 4) if status != "done" else None)


@pytest.mark.slow
def test_ranks_stop_because_their_launcher_was_killed(directory: RunDirectory) -> None:
    """Nobody asked for that, so it is a failure, and the run is started again."""
    failure = failed(
        directory,
        """
def leave(*_):
    record(0, "resumable", exit_code=4)
    os._exit(0)
if os.fork() == 0:
    signal.signal(signal.SIGTERM, leave)
    record(0, "running")
    time.sleep(600)
while not os.path.exists("ranks/rank-0.json"): time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    assert (failure.stopped, failure.exit_code) == (False, 4)
    assert failure.code == "HT-launcher-killed" and "(SIGKILL)" in failure.message


@pytest.mark.slow
@pytest.mark.parametrize("listens", [False, True])
def test_sigterm_waits_for_a_script_that_listens(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    """It saves its state, and then hangs; one that does not listen is ended."""
    monkeypatch.setattr(running_job, "_FINALIZE_SECONDS", 0.2)
    failure = failed(
        directory,
        f"""
record(0, "running", listens={listens})
os.kill(os.getppid(), signal.SIGTERM)
while not os.path.exists("stop"): time.sleep(0.01)
record(0, "resumable", exit_code=4)
time.sleep(600)
""",
    )
    assert (failure.code, failure.stopped, failure.exit_code) == (
        ("HT-run-interrupted", True, 4) if listens else ("HT-run-interrupted", False, 1)
    )
    assert "SIGTERM" in failure.message


@pytest.mark.slow
def test_a_cancelled_script(directory: RunDirectory) -> None:
    failure = failed(
        directory,
        """
record(0, "running")
open("stop", "w").write("cancelled\\n")
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(600)
""",
    )
    assert (failure.code, failure.exit_code) == ("HT-run-interrupted", 1) and failure.message.startswith("cancelled; ")


@pytest.mark.slow
@pytest.mark.parametrize("first", ["USR1", "USR2", "INT", "TERM"])
def test_a_second_signal_ends_ranks_that_do_not_stop(
    directory: RunDirectory, request: pytest.FixtureRequest, first: str
) -> None:
    """Within the minute that they would have. One that only asks, as Slurm may deliver it twice or before SIGTERM, does
    not count.
    """
    before = signal.getsignal(signal.SIGINT)
    # Of jobs in the background a shell has it ignored, and an ignored one stays so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    failure = failed(
        directory,
        f"""
record(0, "running", listens=True)
os.kill(os.getppid(), signal.SIG{first})
while not os.path.exists("stop"): time.sleep(0.01)
os.kill(os.getppid(), signal.SIGUSR1)
time.sleep(0.5)
if {first!r} in ("USR1", "USR2"):
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(0.5)
open("asked twice", "w").close()
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(600)
""",
    )
    assert Path("asked twice").exists()
    assert (failure.code, failure.exit_code) == ("HT-run-interrupted", 4) and f"SIG{first}" in failure.message
    assert read_records(directory)[0].process() is None

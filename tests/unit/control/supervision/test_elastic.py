"""An elastic run and its hosts. A script stands in for Open MPI's mpirun with its ranks, and one for ssh."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli.main import main
from hpctrain.common.run.events import read_events
from hpctrain.common.run.plan import Plan
from hpctrain.control.launchers.command_line import TRAIN
from hpctrain.control.supervision import host_questions, supervisor
from support import needs
from support.refusals import codes

pytestmark = [needs.pytorch, pytest.mark.slow]

# Line by line what each attempt does: "lose HOST" loses that host, "work HOST" does a step and loses that host, "hang
# HOST" hangs first, "crash" is a script with an error, "fail" starts nothing, and a last one is done.
MPIRUN = f"""#!{sys.executable}
import json, sys, time
from pathlib import Path

if sys.argv[1] == "--version":
    sys.exit(print("mpirun (Open MPI) 5.0.11"))
run, ranks = Path(sys.argv[-1]), int(sys.argv[sys.argv.index("-np") + 1])
todo = Path("todo").read_text().splitlines()
Path("todo").write_text("\\n".join(todo[1:]))
what, *host = todo[0].split() if todo else ["done"]

def emit(kind, **values):
    with open(run / "events.jsonl", "a") as events:
        print(json.dumps(dict(time=time.time(), event=kind, **values)), file=events)

def record(status, **more):
    for rank in range(ranks):
        record = dict(rank=rank, host="n1", pid=1, started=1.0, status=status, **more)
        new = run / f"{{rank}}.new"
        new.write_text(json.dumps(record))
        new.rename(run / "ranks" / f"rank-{{rank}}.json")

if what == "fail":
    sys.exit("no data folder here")
if what == "work":
    nothing = dict.fromkeys(["recipe", "epochs", "iterations_per_epoch", "parameters"])
    emit("run", framework="torch", backend="mpi", ranks=ranks, **nothing)
    unknown = dict.fromkeys(["epoch", "loss", "learning_rate", "samples", "communication_seconds"])
    emit("step", iteration=1, seconds=0.1, **unknown)
if what == "hang":
    time.sleep(1.2)
    emit("stall", rank=1, host="n2", waiting_for="step 1", seconds=1.1)
if what in ("lose", "work", "hang"):
    print("PRTE has lost communication with a remote daemon.\\n\\n  Remote daemon: [n1-1@0,1] on node", *host)
    sys.exit()
if what == "crash":
    record("failed", exit_code=1, error=dict(type="ImportError", message="no module"))
    sys.exit(1)
record("done")
"""
# Who is named in "off" does not answer; the others do what they are asked.
SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
if grep -qw "$1" off; then exit 255; fi
if [ -e "answer-$1" ]; then exec cat "answer-$1"; fi
exec "$2"
"""
ELASTIC = ["--backend", "mpi", "--run-dir", "run", "--set", "fault_tolerance=elastic"]


@pytest.fixture(autouse=True)
def _programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bin").mkdir()
    for name, script in {"mpirun": MPIRUN, "ssh": SSH, "scontrol": "#!/bin/sh\nexit 1\n"}.items():
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr("hpctrain.control.supervision.start.require", lambda framework: None)
    monkeypatch.setattr("hpctrain.control.supervision.supervisor.wait_seconds", lambda number: 0.0)
    # All hosts are this one, where the launcher is always found.
    monkeypatch.setattr(host_questions, "_PROGRAM", host_questions._PROGRAM.replace(TRAIN, "elsewhere"))
    Path("off").touch()
    Path("hosts.txt").write_text("n1\nn2\nn3\n")


def events(*kinds: str) -> list[Any]:
    return [event for event in read_events(Path("run/events.jsonl")) if event.event in kinds]


def starts() -> list[list[str]]:
    return [list(event.hosts) for event in events("start")]


def todo(*lines: str) -> None:
    Path("todo").write_text("\n".join(lines))


def run(*options: str) -> int:
    return main(["run", "digits", *ELASTIC, *options])


def script(*options: str) -> int:
    Path("train.py").touch()
    return main(["run", "train.py", *ELASTIC, *options])


def at_a_restart(monkeypatch: pytest.MonkeyPatch, *changes: Callable[[], object]) -> None:
    """Before the hosts are chosen for a further attempt, the next of the changes is made."""
    left, given_hosts = list(changes), supervisor.Supervisor._given_hosts

    def changed(self: supervisor.Supervisor, now: Plan) -> dict[str, int]:
        if left:
            left.pop(0)()
        return given_hosts(self, now)

    monkeypatch.setattr(supervisor.Supervisor, "_given_hosts", changed)


def listed(*hosts: str) -> Callable[[], int]:
    """A change of the hostfile to one that names these."""
    return lambda: Path("hosts.txt").write_text("".join(f"{host}\n" for host in hosts))


@pytest.mark.long
def test_it_begins_without_a_host_that_does_not_answer_and_a_restart_takes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host that is lost comes back in the same way."""
    Path("off").write_text("n3")
    todo("lose n2", "lose n1")
    at_a_restart(monkeypatch, lambda: Path("off").write_text("n2"), lambda: Path("off").write_text(""))
    assert run("--hosts", "n1,n2,n3") == 0
    # A host that is lost in a second restart without progress is left out once, whether or not it answers.
    assert starts() == [["n1", "n2"], ["n1", "n3"], ["n2", "n3"]]
    plan = json.loads(Path("run/plan.json").read_text())
    assert (plan["ranks"], plan["begun_ranks"]) == (2, 3)
    said = capsys.readouterr().err
    assert "warning: n3 " in said and "with 2 of 2 ranks on n[1,3]" in said


@pytest.mark.long
def test_a_hostfile_grows_and_shrinks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A host that is not fit is left out and named; one that does not answer makes room for another."""
    todo("lose n2", "lose n3", "lose n3")
    Path("answer-n4").write_text("hpctrain-answer:reached\nhpctrain-answer:sees-0\n")
    Path("off").write_text("n2")
    Path("hosts.txt").write_text("n1\nn3\n")
    changes = (listed("n1", "n2", "n3", "n4", "n5"), listed("n1", "n5"), listed())
    at_a_restart(monkeypatch, *changes)
    assert run("--hostfile", "hosts.txt", "--set", "fault_tolerance.max_ranks=4") == 0
    assert starts() == [["n1", "n3"], ["n1", "n3", "n5"], ["n1", "n5"], ["n1", "n5"]]
    assert json.loads(Path("run/plan.json").read_text())["begun_ranks"] is None
    said = capsys.readouterr().err
    assert said.count("warning: n4 ") == said.count("hosts.txt names no host") == 1


@pytest.mark.long
def test_a_script_is_started_again_on_the_hosts_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkpoint that anybody knows of. Its failures count until it has worked for long."""
    todo("work n2", "work n3", "work n1")
    at_a_restart(monkeypatch, listed("n1", "n3", "n4"), listed("n1", "n4"))
    assert script("--hostfile", "hosts.txt", "--restarts", "2") == 4
    assert starts() == [["n1", "n2", "n3"], ["n1", "n3", "n4"], ["n1", "n4"]]
    assert [event.restart for event in events("start")] == [0, 1, 2]


@pytest.mark.long
def test_to_hang_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "WORK_SECONDS", 1.0)
    todo("hang n2", "hang n2", "hang n2")
    assert script("--hostfile", "hosts.txt", "--restarts", "1") == 4
    assert [event.restart for event in events("start")] == [0, 1]


def test_a_script_with_an_error_of_its_own_is_not_started_again() -> None:
    todo("crash")
    assert script("--hostfile", "hosts.txt") == 1
    assert len(starts()) == 1


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("fault_tolerance=shrink", "fault_tolerance: shrink is for recipes"),
        ("fault_tolerance.lost_rank=shrink", "fault_tolerance: shrink is for recipes"),
        ("fault_tolerance.min_ranks=4", "fault_tolerance.min_ranks is 4, and the run has 3 ranks"),
        ("fault_tolerance=elastik", "--set fault_tolerance=elastik"),
        ("fault_tolerance.mni_ranks=4", "unknown key 'mni_ranks'"),
    ],
)
def test_what_a_script_cannot_be(setting: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert script("--hosts", "n1,n2,n3", "--set", setting) == 2
    assert said in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.long
def test_a_script_of_which_nothing_is_said_is_not_started_again() -> None:
    Path("train.py").touch()
    todo("lose n2")
    assert main(["run", "train.py", "--backend", "mpi", "--run-dir", "run", "--hostfile", "hosts.txt"]) == 4
    assert len(starts()) == 1


@pytest.mark.long
def test_what_is_left_of_two_ranks_is_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the backend would be of one rank that stays alone."""
    todo("lose n2", "lose n2")
    at_a_restart(monkeypatch, lambda: Path("off").write_text("n2"), lambda: Path("off").write_text(""))
    host = socket.gethostname()
    arguments = ["--hosts", f"{host},n2", "--run-dir", "run", "--set", "fault_tolerance=elastic"]
    assert main(["run", "digits", *arguments]) == 0
    assert starts() == [[host, "n2"], [host], [host]]


@pytest.mark.parametrize(
    ("limit", "off", "code"),
    [("max_ranks=2", "", "HT-ranks-too-many"), ("min_ranks=2", "n2\nn3", "HT-hosts-too-few")],
)
def test_limits_that_it_cannot_begin_within(
    limit: str, off: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("off").write_text(off)
    assert run("--hosts", "n1,n2,n3", "--set", f"fault_tolerance.{limit}") == 2
    assert codes(capsys.readouterr().err) == [code]
    assert not Path("run").exists()


@pytest.mark.long
def test_a_resume_has_the_hosts_of_then() -> None:
    todo("lose n2")
    assert run("--hostfile", "hosts.txt", "--restarts", "0") == 4
    Path("hosts.txt").write_text("n1\nn3\nn4\nn5\n")
    Path("off").write_text("n5")
    assert main(["run", "--resume", "--run-dir", "run"]) == 0
    assert starts() == [["n1", "n2", "n3"], ["n1", "n3", "n4"]]

"""An elastic run and its hosts. A script stands in for Open MPI's mpirun with its ranks, and one for ssh."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpctrain.cli.main import main
from hpctrain.common.run.events import read_events
from hpctrain.control.launchers.command_line import TRAIN
from hpctrain.control.supervision import host_questions, host_watch, supervisor
from support import needs
from support.refusals import codes

pytestmark = [needs.pytorch, pytest.mark.slow]

# Line by line what each attempt does: "save" writes checkpoint after checkpoint until it is to stop, "lose HOST" loses
# that host, "shrink HOST" goes on without the rank of one, "listen" is a script that can be stopped, "deaf" one that
# cannot until it is told, "work HOST" does a step and loses that host, "hang HOST" hangs first, "crash" is a script
# with an error, "finish" one that takes its time when all is done, and "fail" starts nothing, and a last one is done.
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

def record(status, ranks, **more):
    for rank in ranks:
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
left = list(range(ranks))
if what == "crash":
    record("failed", left, exit_code=1, error=dict(type="ImportError", message="no module"))
    sys.exit(1)
if what == "finish":
    record("done", left, listens=True)
    time.sleep(3)
    sys.exit(Path("flushed").touch())
if what == "wait":
    # Until the silent host is being asked.
    while not Path("asked").exists():
        time.sleep(0.05)
if what == "shrink":
    lost = dict(rank=1, host=host[0], message="rank 1 died", iteration=1, recovery_seconds=0.1)
    emit("fault", samples_affected=0, ranks=ranks - 1, **lost)
    record("lost", [left.pop(1)])
record("running", left)
number = 0
while what == "deaf" and not Path("told").exists():
    time.sleep(0.05)
if what in ("listen", "deaf"):
    record("running", left, listens=True)
    while not (run / "stop").exists():
        time.sleep(0.05)
    emit("stopped", iteration=0, reason=(run / "stop").read_text().strip())
while what in ("save", "shrink") and not (run / "stop").exists():
    number += 1
    emit("checkpoint", iteration=number)
    time.sleep(0.05)
    if number > 2000:
        sys.exit("it was never told to stop")
if what in ("save", "shrink"):
    emit("stopped", iteration=number, reason=(run / "stop").read_text().strip())
record("resumable" if what in ("save", "shrink", "listen", "deaf") else "done", left)
"""
# Who is named in "off" does not answer; the others do what they are asked.
SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
if [ -e "silent-$1" ] && [ -e run ]; then touch asked; exec sleep 600; fi
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
    monkeypatch.setenv("HPCTRAIN_HOST_INTERVAL", "1")
    monkeypatch.setattr("hpctrain.control.supervision.start.require", lambda framework: None)
    monkeypatch.setattr("hpctrain.control.supervision.supervisor.wait_seconds", lambda number: 0.0)
    # All hosts are this one, where the launcher is always found.
    monkeypatch.setattr(host_questions, "_PROGRAM", host_questions._PROGRAM.replace(TRAIN, "elsewhere"))
    # No checkpoint of the script is one.
    monkeypatch.setattr("hpctrain.control.resuming.attempts._require_none_written", lambda *_: None)
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


def listed(*hosts: str) -> Callable[[], int]:
    """A change of the hostfile to one that names these."""
    return lambda: Path("hosts.txt").write_text("".join(f"{host}\n" for host in hosts))


def hosts_change(monkeypatch: pytest.MonkeyPatch, *changes: object) -> None:
    """Before each look at the hosts the next of the changes is made."""
    left = list(changes)
    given_hosts = host_watch.given_hosts

    def look(*arguments: Any) -> dict[str, int]:
        if left:
            left.pop(0)()  # type: ignore[operator]
        return given_hosts(*arguments)

    monkeypatch.setattr(host_watch, "given_hosts", look)


def n2_is_off_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment at which it is lost until the second look at the hosts."""
    silent_hosts = supervisor.silent_hosts

    def gone(*arguments: Any, **options: Any) -> tuple[str, ...]:
        Path("off").write_text("n2")
        return silent_hosts(*arguments, **options)

    monkeypatch.setattr(supervisor, "silent_hosts", gone)
    hosts_change(monkeypatch, lambda: None, lambda: Path("off").write_text(""))


@pytest.mark.long
def test_it_begins_without_a_host_that_does_not_answer_and_goes_on_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("off").write_text("n3")
    todo("save")
    hosts_change(monkeypatch, lambda: None, lambda: Path("off").write_text(""))
    assert run("--hosts", "n1,n2,n3") == 0
    assert starts() == [["n1", "n2"], ["n1", "n2", "n3"]]
    assert [event.reason for event in events("stopped")] == ["n3 joins"]
    # Nothing went wrong.
    assert events("fault") == []
    assert [event.restart for event in events("start")] == [0, 0]
    plan = json.loads(Path("run/plan.json").read_text())
    assert (plan["ranks"], plan["begun_ranks"]) == (3, None)
    said = capsys.readouterr().err
    assert "warning: n3 " in said
    assert " n[1-3]: 2 " in said and " now, 3 " in said


@pytest.mark.long
def test_a_host_that_is_lost_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    todo("lose n2", "save")
    Path("off").write_text("n1x")
    n2_is_off_for_a_while(monkeypatch)
    assert run("--hosts", "n1:2,n2:1,n3:1") == 0
    assert starts() == [["n1", "n2", "n3"], ["n1", "n3"], ["n1", "n2", "n3"]]
    plan = json.loads(Path("run/plan.json").read_text())
    assert (plan["ranks"], plan["begun_ranks"]) == (4, None)


@pytest.mark.long
def test_a_hostfile_grows_and_shrinks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    todo("save", "save")
    hosts_change(
        monkeypatch,
        listed("n1", "n2", "n3", "n4"),
        listed("n1", "n4"),
    )
    assert run("--hostfile", "hosts.txt") == 0
    assert [set(hosts) for hosts in starts()] == [{"n1", "n2", "n3"}, {"n1", "n2", "n3", "n4"}, {"n1", "n4"}]
    assert [event.reason for event in events("stopped")] == ["n4 joins", "n[2-3] leave"]
    assert json.loads(Path("run/plan.json").read_text())["begun_ranks"] == 3
    said = capsys.readouterr().err
    assert " n[1,4]: 4 " in said and " now, 2 " in said


@pytest.mark.long
def test_a_host_that_is_taken_back_while_the_ranks_leave_is_not_started_on(monkeypatch: pytest.MonkeyPatch) -> None:
    todo("save", "save")
    hosts_change(monkeypatch, listed("n1", "n2", "n3", "n4"), listed("n1", "n2", "n3", "n5"))
    go_on = supervisor.Supervisor._restart_on_other_hosts

    def taken_back(self: Any, *arguments: Any) -> Any:
        listed(*(("n1", "n2", "n3") if len(starts()) == 1 else ("n1", "n2", "n3", "n5")))()
        return go_on(self, *arguments)

    monkeypatch.setattr(supervisor.Supervisor, "_restart_on_other_hosts", taken_back)
    assert run("--hostfile", "hosts.txt") == 0
    # And it was not refused: the next that comes may join.
    assert [len(hosts) for hosts in starts()] == [3, 3, 4] and "n5" in starts()[-1]


def script(*options: str) -> int:
    Path("train.py").touch()
    return main(["run", "train.py", *ELASTIC, *options])


@pytest.mark.long
def test_a_script_is_started_again_on_hosts_that_come_and_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a checkpoint that anybody knows of. Only a failure counts, until it has worked for long."""
    todo("listen", "lose n3", "listen")
    hosts_change(
        monkeypatch,
        listed("n1", "n2", "n3", "n4"),
        listed("n1", "n4"),
    )
    assert script("--hostfile", "hosts.txt") == 0
    whole = ["n1", "n2", "n3", "n4"]
    assert [sorted(hosts) for hosts in starts()] == [whole[:3], whole, whole, ["n1", "n4"]]
    assert [event.reason for event in events("stopped")] == ["n4 joins", "n[2-3] leave"]
    assert [event.restart for event in events("start")] == [0, 0, 1, 1]
    said = capsys.readouterr().err
    assert " n[1-4]: 3 " in said and " now, 4 " in said


@pytest.mark.long
def test_a_script_leaves_hosts_with_which_it_does_not_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    todo("listen", "fail")
    hosts_change(monkeypatch, listed("n1", "n2", "n3", "n4"))
    assert script("--hostfile", "hosts.txt", "--restarts", "0") == 0
    assert [len(hosts) for hosts in starts()] == [3, 4, 3]
    assert " n[1-3]" in capsys.readouterr().err


@pytest.mark.long
def test_a_script_is_not_stopped_before_it_can_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    todo("deaf")
    hosts_change(
        monkeypatch,
        listed("n1", "n2", "n3", "n4"),
        lambda: None,
        lambda: Path("told").touch(),
    )
    assert script("--hostfile", "hosts.txt") == 0
    assert [len(hosts) for hosts in starts()] == [3, 4]
    said = capsys.readouterr().err
    assert said.count("n4 joins, ") == said.count("ht.should_stop()") == 1


@pytest.mark.long
def test_a_half_written_hostfile_is_not_told_of_a_script_that_cannot_be_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    todo("deaf")
    hosts_change(
        monkeypatch,
        listed("n1"),
        listed("n1", "n2", "n3"),
        lambda: (Path("hosts.txt").write_text("n1\nn2\nn3\nn4\n"), Path("told").touch()),
    )
    assert script("--hostfile", "hosts.txt") == 0
    assert "n[2-3] leave" not in capsys.readouterr().err


@pytest.mark.long
def test_a_host_that_ends_a_script_again_and_again_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although steps are done on it."""
    todo("listen", "work n4")
    hosts_change(monkeypatch, listed("n1", "n2", "n3", "n4"))
    assert script("--hostfile", "hosts.txt", "--restarts", "0") == 0
    assert [len(hosts) for hosts in starts()] == [3, 4, 3]


@pytest.mark.long
def test_restarts_are_counted_across_hosts_that_join(monkeypatch: pytest.MonkeyPatch) -> None:
    todo("work n2", "listen", "work n3")
    hosts_change(monkeypatch, listed("n1", "n2", "n3", "n4"))
    assert script("--hostfile", "hosts.txt", "--restarts", "1") == 4
    assert [event.restart for event in events("start")] == [0, 1, 1]


@pytest.mark.long
def test_to_hang_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "WORK_SECONDS", 1.0)
    todo("hang n2", "hang n2", "hang n2")
    assert script("--hostfile", "hosts.txt", "--restarts", "1") == 4
    assert [event.restart for event in events("start")] == [0, 1]


def test_what_the_user_asks_for_comes_before_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    todo("listen")
    stop = Path("run/stop")
    hosts_change(monkeypatch, lambda: (Path("hosts.txt").write_text("n1\nn2\nn3\nn4\n"), stop.write_text("mine")))
    assert script("--hostfile", "hosts.txt") == 4
    assert len(starts()) == 1
    assert stop.read_text() == "mine"


@pytest.mark.long
def test_what_ranks_do_at_their_end_is_not_cut_off_for_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    todo("finish")
    hosts_change(monkeypatch, listed("n1", "n2", "n3", "n4"))
    assert script("--hostfile", "hosts.txt") == 0
    assert Path("flushed").exists()
    assert len(starts()) == 1


def test_a_script_with_an_error_of_its_own_is_not_started_again() -> None:
    todo("crash")
    assert script("--hostfile", "hosts.txt") == 1
    assert len(starts()) == 1


@pytest.mark.long
def test_a_script_can_be_resumed_however_often_its_hosts_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    todo("listen", "listen", "lose n1")
    hosts_change(
        monkeypatch,
        listed("n1", "n2", "n3", "n4"),
        listed("n1", "n2", "n3", "n4", "n5"),
    )
    assert script("--hostfile", "hosts.txt", "--restarts", "0", "--idle-restarts", "1") == 4
    assert main(["run", "--resume", "--run-dir", "run"]) == 0
    assert [len(hosts) for hosts in starts()] == [3, 4, 5, 5]


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


@pytest.mark.parametrize("limit", ["fault_tolerance.max_ranks=3", "fault_tolerance.min_ranks=3"])
@pytest.mark.long
def test_within_the_limits(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fourth host the largest number of ranks is exceeded, with two the smallest is not there."""
    looks = []
    todo("save")
    other = "n1\nn2\nn3\nn4\n" if "max" in limit else "n1\nn2\n"
    both = "n1\nn2\nn4\n"
    hosts_change(
        monkeypatch,
        lambda: (looks.append(1), Path("hosts.txt").write_text(other)),
        lambda: looks.append(2),
        lambda: (looks.append(3), Path("hosts.txt").write_text(both)),
    )
    assert run("--hostfile", "hosts.txt", "--set", limit) == 0
    assert looks == [1, 2, 3]
    assert [set(hosts) for hosts in starts()] == [{"n1", "n2", "n3"}, {"n1", "n2", "n4"}]


@pytest.mark.long
def test_a_rank_that_the_others_went_on_without_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    todo("shrink n2")
    monkeypatch.setattr("hpctrain.control.supervision.start.require_mitigation", lambda *_: None)
    assert run("--hosts", "n1,n2,n3", "--set", "fault_tolerance.lost_rank=shrink") == 0
    assert starts() == [["n1", "n2", "n3"]] * 2
    room = "hosts have room for more ranks"
    assert [event.reason for event in events("stopped")] == [room]


@pytest.mark.long
def test_a_host_that_is_not_fit_does_not_join_and_is_named_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    todo("save")
    Path("answer-n4").write_text("hpctrain-answer:reached\nhpctrain-answer:sees-0\n")
    Path("hosts.txt").write_text("n1\nn2\n")
    hosts_change(
        monkeypatch,
        listed("n1", "n2", "n4"),
        lambda: None,
        listed("n1", "n2", "n3", "n4"),
    )
    assert run("--hostfile", "hosts.txt") == 0
    assert starts() == [["n1", "n2"], ["n1", "n2", "n3"]]
    assert capsys.readouterr().err.count(" n4 cannot ") == 1


@pytest.mark.thorough
def test_hosts_with_which_it_does_not_work_are_left_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    todo("save", "fail", "save")
    hosts_change(
        monkeypatch,
        listed("n1", "n2", "n3", "n4"),
        lambda: None,
        listed("n1", "n2", "n3", "n4", "n5"),
    )
    assert run("--hostfile", "hosts.txt", "--restarts", "0") == 0
    before = {"n1", "n2", "n3"}
    assert [set(hosts) for hosts in starts()] == [before, {*before, "n4"}, before, {*before, "n4", "n5"}]
    assert " n[1-3]" in capsys.readouterr().err


@pytest.mark.long
def test_what_is_left_of_two_ranks_is_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the backend would be of one rank that stays alone."""
    todo("lose n2", "save")
    n2_is_off_for_a_while(monkeypatch)
    host = socket.gethostname()
    arguments = ["--hosts", f"{host},n2", "--run-dir", "run", "--set", "fault_tolerance=elastic"]
    assert main(["run", "digits", *arguments]) == 0
    assert starts() == [[host, "n2"], [host], [host, "n2"]]


@pytest.mark.long
def test_a_hostfile_that_names_nobody_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither while it trains, nor when a host is lost."""
    todo("lose n2", "save")
    hosts_change(monkeypatch, lambda: None, listed("n1", "n2", "n3", "n4"))
    whole = supervisor.Supervisor._whole_plan

    def emptied(self: Any) -> Any:
        Path("hosts.txt").write_text("")
        return whole(self)

    monkeypatch.setattr(supervisor.Supervisor, "_whole_plan", emptied)
    assert run("--hostfile", "hosts.txt") == 0
    assert starts() == [["n1", "n2", "n3"], ["n1", "n2", "n3"], ["n1", "n2", "n3", "n4"]]
    said = capsys.readouterr().err
    unreadable = [line for line in said.splitlines() if "warning:" in line and "hosts.txt names" in line]
    assert [set(line.split()) & {"were:", "are:"} for line in unreadable] == [{"were:"}, {"are:"}]


def test_more_than_it_may_have_to_begin_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--hosts", "n1,n2,n3", "--set", "fault_tolerance.max_ranks=2") == 2
    assert codes(capsys.readouterr().err) == ["HT-ranks-too-many"]


@pytest.mark.long
def test_the_end_does_not_wait_for_a_silent_host() -> None:
    """Neither does a question outlive the run."""
    Path("off").write_text("n3")
    Path("silent-n3").touch()
    todo("wait")
    # Hosts of other tests may be there too.
    before = psutil.Process().children(recursive=True)
    assert run("--hostfile", "hosts.txt") == 0
    assert starts() == [["n1", "n2"]]
    after = psutil.Process().children(recursive=True)
    assert "sleep" not in [process.name() for process in after if process not in before]


def test_too_few_to_begin_with(capsys: pytest.CaptureFixture[str]) -> None:
    Path("off").write_text("n2\nn3")
    assert run("--hosts", "n1,n2,n3", "--set", "fault_tolerance.min_ranks=2") == 2
    assert codes(capsys.readouterr().err) == ["HT-hosts-too-few"]
    assert not Path("run").exists()


@pytest.mark.long
def test_a_resume_has_the_hosts_of_then(monkeypatch: pytest.MonkeyPatch) -> None:
    todo("lose n2")
    assert run("--hostfile", "hosts.txt", "--restarts", "0") == 4
    Path("hosts.txt").write_text("n1\nn3\nn4\nn5\n")
    Path("off").write_text("n5")
    assert main(["run", "--resume", "--run-dir", "run"]) == 0
    assert starts() == [["n1", "n2", "n3"], ["n1", "n3", "n4"]]


def test_an_interval_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPCTRAIN_HOST_INTERVAL", "0")
    assert run("--hosts", "n1,n2") == 2
    said = capsys.readouterr().err
    assert codes(said) == ["HT-variable-invalid"] and "HPCTRAIN_HOST_INTERVAL='0'" in said

"""A run that goes on by itself when a host is lost. Scripts stand in for Open MPI's mpirun with its ranks, and ssh."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli.main import main
from hpctrain.common.run.events import read_events
from support import needs

pytestmark = pytest.mark.slow

# The first time, or each time, n2 is lost; else all ranks are done.
MPIRUN = f"""#!{sys.executable}
import json, sys
from pathlib import Path

if sys.argv[1] == "--version":
    sys.exit(print("mpirun (Open MPI) 5.0.11"))
with open("commands", "a") as commands:
    print(*sys.argv, file=commands)
run = Path(sys.argv[-1])
lose = Path("lose").read_text().split()
if lose:
    with open("gone", "a") as gone:
        print(*lose[0].split("+"), file=gone)
    Path("lose").write_text(" ".join(lose[1:]))
    if lose[0] == "nothing":
        sys.exit("n3: no route to host")
    if "late" in lose[1:]:
        with open(run / "events.jsonl", "a") as events:
            print(json.dumps(dict(time=1.0, event="end", status="done", seconds=1.0)), file=events)
    for host in lose[0].split("+"):
        print("PRTE has lost communication with a remote daemon.\\n\\n  Remote daemon: [n1-1@0,1] on node", host)
    sys.exit()
for rank in range(int(sys.argv[sys.argv.index("-np") + 1])):
    record = dict(rank=rank, host="n1", pid=1, started=1.0, status="done")
    (run / "ranks" / f"rank-{{rank}}.json").write_text(json.dumps(record))
"""
# Hosts that were lost do not answer, unless somebody has mended them; the others do what they are asked.
SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
if [ -e gone ] && [ ! -e mended ] && grep -qw "$1" gone; then exit 255; fi
"""
ANSWER = 'exec "$2"\n'
HOSTS = ["--hosts", "n1:2,n2:1,n3:1", "--backend", "mpi", "--run-dir", "run"]
# What each of four ranks computes at once.
GROUPS = ["--set", "model.name=resnet18", "--set", "model.batch_norm.span=16"]
SHRINK = ["--set", "fault_tolerance.lost_rank=shrink"]


@pytest.fixture(autouse=True)
def _programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bin").mkdir()
    for name, script in {"mpirun": MPIRUN, "ssh": SSH + ANSWER, "scontrol": "#!/bin/sh\nexit 1\n"}.items():
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr("hpctrain.control.supervision.start.require", lambda framework: None)
    monkeypatch.setattr("hpctrain.control.supervision.execution.wait_seconds", lambda number: 0.0)


def events(*kinds: str) -> list[Any]:
    return [event for event in read_events(Path("run/events.jsonl")) if event.event in kinds]


def commands() -> list[list[str]]:
    return [line.split() for line in Path("commands").read_text().splitlines()]


@pytest.mark.parametrize("options", [SHRINK, []])
@needs.pytorch
@pytest.mark.long
def test_on_the_hosts_that_are_left(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Whether or not the ranks of a run can go on without one that died: here all of a host's are gone."""
    Path("lose").write_text("n2 n3")
    assert main(["run", "digits", *HOSTS, *options]) == 0
    assert [event.event for event in events("start", "fault", "end")] == ["start", "fault"] * 2 + ["start"]
    assert [list(event.hosts) for event in events("start")] == [["n1", "n2", "n3"], ["n1", "n3"], ["n1"]]
    assert [event.attempt for event in events("start")] == [1, 2, 3]
    assert [event.host for event in events("fault")] == ["n2", "n3"]
    assert [(words[words.index("-np") + 1], words[words.index("--host") + 1]) for words in commands()] == [
        ("4", "n1:2,n2:1,n3:1"),
        ("3", "n1:2,n3:1"),
        ("2", "n1:2"),
    ]
    plan = json.loads(Path("run/plan.json").read_text())
    assert (plan["ranks"], plan["begun_ranks"]) == (2, 4)
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["status"], [fault["host"] for fault in summary["survived"]]) == ("done", ["n2", "n3"])
    said = capsys.readouterr().err
    ranks = " 3 of 4 "
    assert "host n2 " in said and ranks in said and " n[1,3] " in said
    assert "host n3 " in said and "from n2; " in said


@needs.pytorch
@pytest.mark.long
def test_a_host_that_answers_is_given_one_more_chance() -> None:
    Path("lose").write_text("n2 n2 n3")
    Path("mended").touch()
    assert main(["run", "digits", *HOSTS]) == 0
    everywhere = ["n1", "n2", "n3"]
    assert [list(event.hosts) for event in events("start")] == [everywhere, everywhere, ["n1", "n3"], ["n1", "n2"]]


@needs.pytorch
@pytest.mark.long
def test_a_host_that_is_back_takes_part_again() -> None:
    Path("lose").write_text("n2 n3")
    # n2 is silent once, whenever the others are asked.
    (Path("bin") / "ssh").write_text(SSH.replace("exit 255", "touch mended; exit 255") + ANSWER)
    assert main(["run", "digits", *HOSTS]) == 0
    assert [list(event.hosts) for event in events("start")] == [["n1", "n2", "n3"], ["n1", "n3"], ["n1", "n2"]]


@needs.pytorch
def test_no_host_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lose").write_text("n1+n2+n3")
    assert main(["run", "digits", *HOSTS]) == 4
    assert "n[1-3]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        (["--restarts", "0"], 1),
        ([*SHRINK, "--set", "fault_tolerance.min_ranks=3"], 2),
        ([*SHRINK, "--restarts", "1"], 2),
    ],
)
@needs.pytorch
def test_otherwise_it_ends_resumably(options: list[str], starts: int) -> None:
    Path("lose").write_text("n2 n3")
    assert main(["run", "digits", *HOSTS, *options]) == 4
    assert len(events("start")) == len(commands()) == starts
    assert json.loads(Path("run/summary.json").read_text())["failure"]["host"] == ["n2", "n3"][starts - 1]


@needs.pytorch
def test_a_later_resume_has_all_ranks_again() -> None:
    """As in another job, whose nodes are whole."""
    Path("lose").write_text("n2 n3")
    assert main(["run", "digits", *HOSTS, *SHRINK, "--set", "fault_tolerance.min_ranks=3"]) == 4
    Path("mended").touch()
    assert main(["run", "--resume", "--run-dir", "run"]) == 0
    assert [list(event.hosts) for event in events("start")][-1] == ["n1", "n2", "n3"]
    plan = json.loads(Path("run/plan.json").read_text())
    assert (plan["ranks"], plan["begun_ranks"]) == (4, None)


@needs.pytorch
def test_with_another_number_of_ranks_the_batch_is_for_those() -> None:
    Path("lose").write_text("n2 n3")
    assert main(["run", "digits", *HOSTS, *SHRINK, "--set", "fault_tolerance.min_ranks=2", "--restarts", "1"]) == 4
    assert json.loads(Path("run/plan.json").read_text())["begun_ranks"] == 4
    for options in (["-np", "2"], []):
        assert main(["run", "--resume", "--run-dir", "run", *options]) == 0
        plan = json.loads(Path("run/plan.json").read_text())
        assert (plan["ranks"], plan["begun_ranks"]) == (2, None)


@needs.pytorch
def test_batch_statistics_must_come_out_on_the_ranks_of_now(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lose").write_text("nothing")
    assert main(["run", "digits", *HOSTS, *GROUPS]) != 0
    before = Path("run/plan.json").read_text()
    resume = ["run", "--resume", "--run-dir", "run", "--hosts", "n1:3,n2:1,n3:1"]
    capsys.readouterr()
    assert main([*resume, "-np", "3"]) == 2
    assert "model.batch_norm.span=16" in capsys.readouterr().err
    assert Path("run/plan.json").read_text() == before
    assert main([*resume, "-np", "2"]) == 0


@needs.pytorch
def test_hosts_that_are_left_and_do_not_come_out_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lose").write_text("n2")
    assert main(["run", "digits", *HOSTS, *SHRINK, *GROUPS]) == 4
    assert ": model.batch_norm.span=16" in capsys.readouterr().err


@needs.pytorch
def test_further_attempts_that_start_nothing_can_be_resumed() -> None:
    Path("lose").write_text("n2 nothing nothing nothing")
    assert main(["run", "digits", *HOSTS, *SHRINK]) == 4
    assert [event.status for event in events("end")] == ["resumable"]
    assert len(events("start")) == 4
    Path("lose").write_text("nothing")
    assert main(["run", "digits", *HOSTS[:-1], "fresh"]) == 1


@needs.pytorch
def test_a_host_that_goes_when_all_is_done_changes_nothing() -> None:
    Path("lose").write_text("n2 late")
    assert main(["run", "digits", *HOSTS, "--set", "fault_tolerance.lost_rank=stop"]) == 0
    assert [event.status for event in events("fault", "end")] == ["done"]
    assert json.loads(Path("run/summary.json").read_text())["status"] == "done"

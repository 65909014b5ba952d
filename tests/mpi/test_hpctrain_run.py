"""``hpctrain run`` on real ranks: how a run ends, in good and in bad cases.

The program waits for 600 s, so a run that is not ended at once fails at the limit of the ``hpctrain`` fixture.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hpctrain.common.cluster.machine import usable_cores
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import read_events
from hpctrain.common.run.records import read_records
from support.interrupted_runs import started
from support.launching import AS_ROOT, Launch

PROGRAM = Path(__file__).parent / "programs" / "run_script.py"
HOST = socket.gethostname()


def failure(run_dir: Path, status: str = "failed") -> dict[str, object]:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == status
    found = summary["failure"]
    assert isinstance(found, dict)
    return found


def test_a_script_in_odd_places(hpctrain: Launch, tmp_path: Path) -> None:
    script = tmp_path / 'it\'s a "script" $HOME.py'
    script.write_text(PROGRAM.read_text())
    run_dir = tmp_path / 'runs; of "mine"' / "it's one"
    odd = ["--lr", "a b", "it's", "$HOME", ""]
    result = hpctrain("run", script.name, "-np", "2", "--run-dir", str(run_dir), "--", "sum", *odd)
    assert result.returncode == 0, result.stdout
    assert f"arguments {odd}" in result.stdout
    assert f"sum [3.] {max(1, usable_cores() // 2)}\n" in result.stdout
    # Rank 0 is streamed, once; rank 1 has its log.
    assert result.stdout.count("sum [3.]") == 1
    assert "sum [3.]" in (run_dir / "logs" / "rank-1.log").read_text()
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "done"
    plan = json.loads((run_dir / "plan.json").read_text())
    assert (plan["ranks"], plan["script"]["path"]) == (2, str(script))
    records = read_records(RunDirectory(run_dir))
    assert {rank: (record.host, record.status) for rank, record in records.items()} == {
        0: (HOST, "done"),
        1: (HOST, "done"),
    }


def test_metrics_and_events_of_a_script(hpctrain: Launch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = hpctrain("run", str(PROGRAM), "-np", "2", "--run-dir", "run", "--", "metrics")
    assert done.returncode == 0, done.stdout
    run_dir = RunDirectory(tmp_path / "run")
    for rank in range(2):
        said = run_dir.log(rank).read_text()
        samples = re.findall(r"samples (\d+) of (.*)", said)
        assert samples == [("41", "[21, 20]")]
        off = {name: float(value) for name, value in re.findall(r"(\w+) off by (\S+)", said)}
        assert off["loss"] < 1e-14 and off["accuracy"] == 0
    assert "  test/accuracy " in run_dir.log(0).read_text()
    events = [event for event in read_events(run_dir.events) if event.event not in ("start", "end")]
    assert [event.event for event in events] == ["run", "step", "log", "step", "log", "log", "energy"]
    assert events[0].bucket_mb == 25
    assert all(math.isfinite(event.values["loss"]) for event in events if event.event == "log" and event.iteration < 2)
    result = hpctrain("report", "run")
    assert result.returncode == 0 and "<figcaption>test/accuracy</figcaption>" in run_dir.report.read_text()


STREAMS = """
import logging, sys, time, warnings

import hpctrain as ht

comm = ht.init()
print("out", comm.rank)
print("err", comm.rank, file=sys.stderr)
warnings.warn("warned")
logging.warning("logged")
for step in range(1, 31):
    print(f"\\rstep {step}/30", end="", file=sys.stderr, flush=True)
    time.sleep(0.05)
print(file=sys.stderr)
print("last", end="", flush=True)
# The log of another rank that failed first would be quoted.
time.sleep(60 * comm.rank)
raise ValueError("é")
"""


def test_what_rank_0_prints_is_shown_on_a_terminal_as_it_comes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STREAMS)
    words = ["run", "script.py", "-np", "2", "--run-dir", "run", "--backend", "mpi"]
    command = [sys.executable, "-m", "hpctrain", *words]
    environment = {**os.environ, **AS_ROOT}
    ours, theirs = os.openpty()
    with subprocess.Popen(command, cwd=tmp_path, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = []
        # Linux says with an error that nobody has the other end of a terminal open.
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 4096):
                shown.append(piece)
    os.close(ours)
    terminal = b"".join(shown).decode().replace("\r\n", "\n")
    assert process.returncode == 1
    assert {"out 0", "err 0", "WARNING:root:logged"} < {*terminal.splitlines()}
    assert "UserWarning: warned" in terminal
    assert "".join(f"\rstep {step}/30" for step in range(1, 31)) in terminal
    # It came in pieces, while it was drawn.
    assert len([piece for piece in shown if b"step" in piece]) > 1
    # The error with its traceback, and in the sentence at the end.
    assert [terminal.count(text) for text in ("Traceback", "HT-rank-exception", "ValueError: é")] == [1, 1, 2]
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_bytes()
    places = [log.find(word) for word in (b"out 0", b"err 0", b"step 1/", b"last", b"Traceback")]
    assert -1 not in places and places == sorted(places)


@pytest.mark.thorough
def test_a_script_starts_processes_by_mpi(hpctrain: Launch, tmp_path: Path) -> None:
    """They need slots, and TCP to their rank, where the ranks have all cores."""
    body = "from mpi4py.futures import MPIPoolExecutor\nif __name__ == '__main__':\n    "
    body += "print(list(MPIPoolExecutor(3).map(abs, [-1, -2])))\n"
    (tmp_path / "script.py").write_text(body)
    result = hpctrain("run", "script.py", "-np", "2", "--oversubscribe", "--run-dir", "run")
    assert result.returncode == 0 and "[1, 2]\n" in result.stdout, result.stdout
    assert "[1, 2]\n" in (tmp_path / "run" / "logs" / "rank-1.log").read_text()


@pytest.mark.parametrize(
    ("way", "status", "code", "told"),
    [
        (
            "raise",
            "failed",
            "HT-rank-exception",
            ("ValueError: boom", "logs/rank-1.log", "about to fail", 'raise ValueError("boom")'),
        ),
        ("leave", "failed", "HT-rank-exit", ("status 7",)),
        ("kill", "resumable", "HT-rank-killed", ("(SIGKILL)", "about to die", "hpctrain run --resume --run-dir run\n")),
    ],
)
def test_one_rank_ends_the_run(
    hpctrain: Launch, tmp_path: Path, way: str, status: str, code: str, told: tuple[str, ...]
) -> None:
    result = hpctrain("run", str(PROGRAM), "-np", "2", "--run-dir", "run", "--", way, timeout=300)
    assert result.returncode == (4 if status == "resumable" else 1)
    for part in told:
        assert part in result.stdout
    # The traceback begins in the user's script.
    assert "runpy" not in result.stdout
    found = failure(tmp_path / "run", status)
    assert (found["code"], found["rank"], found["host"]) == (code, 1, HOST)


def test_an_interrupt_ends_every_process(tmp_path: Path) -> None:
    """Rank 1 ignores SIGTERM."""
    words = [str(PROGRAM), "-np", "2", "--run-dir", "run", "--stop-seconds", "3", "--", "wait"]
    with started(tmp_path, words) as process:
        assert process.stdout is not None
        assert any("ready" in line for line in process.stdout)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 3
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=200)
    # Ctrl-C is a KeyboardInterrupt in the script, and the run can go on from what it saved.
    assert process.returncode == 4
    assert "SIGINT" in output and failure(tmp_path / "run", "resumable")["code"] == "HT-run-interrupted"
    assert not [member for member in family if member.is_running()]
    records = read_records(RunDirectory(tmp_path / "run"))
    assert len(records) == 2
    assert not any(record.process() for record in records.values())


def test_a_directory_that_is_deleted_before_its_ranks_begin(hpctrain: Launch, tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    # The first rank to come does it.
    interpreter.write_text(f'#!/bin/sh\nmkdir once 2>/dev/null && rm -r run\nsleep 0.3\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o700)
    options = ("-np", "2", "--oversubscribe", "--run-dir", "run")
    result = hpctrain("run", str(PROGRAM), *options, "--python", str(interpreter), "--", "sum")
    assert result.returncode == 1, result.stdout
    assert "Traceback" not in result.stdout
    assert not any((tmp_path / "run").glob("*"))


@pytest.mark.long
def test_torchrun_starts_the_ranks_of_this_machine(hpctrain: Launch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = hpctrain("run", "digits", "-np", "2", "--launcher", "torchrun", "--set", "epochs=1", "--run-dir", "run")
    assert done.returncode == 0, done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["backend"], summary["ranks"]) == ("done", "gloo", 2)

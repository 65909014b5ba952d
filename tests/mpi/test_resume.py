"""Runs on real ranks that are interrupted and resumed: the same bits as without the interruptions."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import read_events
from hpctrain.common.run.records import read_records
from support.interrupted_runs import ask, assert_same_bits, interrupted, numbers, paused, started, wait_for_steps
from support.launching import Launch

TORCH = ["--set", "epochs=6"]


def failure(run: Path) -> dict[str, object]:
    found = json.loads((run / "summary.json").read_text())["failure"]
    assert isinstance(found, dict)
    return found


@pytest.mark.long
def test_pytorch_stopped_and_killed(hpctrain: Launch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    whole = hpctrain("run", "digits", "-np", "2", *TORCH, "--run-dir", "whole")
    assert whole.returncode == 0, whole.stdout
    run = tmp_path / "run"
    status, output = interrupted(tmp_path, 5, ["digits", "-np", "2", *TORCH], lambda pid: ask(run, pid, signal.SIGTERM))
    assert status == 4, output
    resume = "hpctrain run --resume --run-dir run\n"
    for part in ("SIGTERM: ", " 60 s ", resume):
        assert part in output
    assert failure(run)["code"] == "HT-run-interrupted"
    stop = list(read_events(run / "events.jsonl"))[-2]
    assert (stop.event, stop.reason) == ("stopped", "SIGTERM")
    assert json.loads((run / "summary.json").read_text())["status"] == "resumable"
    shutil.copytree(run, tmp_path / "narrow")

    def signal_rank_1(number: signal.Signals) -> None:
        os.kill(read_records(RunDirectory(run))[1].pid, number)

    def kill_and_stop(pid: int) -> None:
        """Rank 1 is killed, and the launcher starts both again; then it gets what Slurm may send to each rank."""
        signal_rank_1(signal.SIGKILL)
        wait_for_steps(run, attempt=3, steps=5)
        with paused(run):
            signal_rank_1(signal.SIGINT)

    status, output = interrupted(tmp_path, 5, ["--resume"], kill_and_stop)
    assert status == 4, output
    for part in (f"step {stop.iteration} (attempt 2)", "rank 1 on ", "(SIGKILL)", "2 of 2 ranks", "(restart 1 of 3)"):
        assert part in output
    assert "(attempt 3)" in output
    last = hpctrain("run", "--resume", "--run-dir", "run")
    assert last.returncode == 0, last.stdout
    assert_same_bits(run, tmp_path / "whole")
    starts = [event.attempt for event in read_events(run / "events.jsonl") if event.event == "start"]
    assert starts == [1, 2, 3, 4]
    kinds = [event.event for event in read_events(run / "events.jsonl")]
    assert (kinds.count("fault"), kinds.count("stopped")) == (1, 2)
    again = hpctrain("run", "--resume", "--run-dir", "run")
    assert again.returncode == 0 and len(again.stdout.splitlines()) == 1, again.stdout

    narrow = hpctrain("run", "--resume", "--run-dir", "narrow", "-np", "1", "--backend", "single")
    assert narrow.returncode == 0, narrow.stdout
    # Equal to rounding, which grows with the steps.
    one, two = ([row[2] for row in numbers(tmp_path / name) if row[0]] for name in ("narrow", "whole"))
    assert len(one) == len(two)
    first = stop.iteration
    assert one[:first] == two[:first]
    assert one[first : first + 5] == pytest.approx(two[first : first + 5], abs=1e-4)


DEAF = """
import time
import hpctrain as ht

comm = ht.init()
ht.should_stop()
open(f"at work {comm.rank}", "w").close()
time.sleep(600)
"""


def test_a_second_signal_does_not_wait_for_ranks(tmp_path: Path) -> None:
    """Which can stop, as far as the launcher knows, and never look whether they should."""
    (tmp_path / "train.py").write_text(DEAF)
    run = RunDirectory(tmp_path / "run")
    with started(tmp_path, ["train.py", "-np", "2", "--stop-seconds", "300"]) as process:
        wait_for(process, *(tmp_path / f"at work {rank}" for rank in (0, 1)))
        process.send_signal(signal.SIGINT)
        wait_for(process, run.stop)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 4, output
    assert "SIGINT" in output and failure(run.path)["code"] == "HT-run-interrupted"
    assert [record.process() for record in read_records(run).values()] == [None, None]


def wait_for(process: subprocess.Popen[str], *paths: Path) -> None:
    deadline = time.monotonic() + 200
    while not all(path.exists() for path in paths):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=5)[0]
        time.sleep(0.05)

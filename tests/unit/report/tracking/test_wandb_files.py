"""What is written for Weights & Biases, as its own reader finds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.common.run.directory import RunDirectory
from support import needs
from support.report.written_curves import send
from support.report.written_runs import recipe_plan, run_events, write_run

pytestmark = [needs.wandb, pytest.mark.slow]

START = {"time": 1_700_000_000.0, "event": "start", "attempt": 1, "iteration": 0}


def records(directory: RunDirectory) -> list[dict[str, Any]]:
    """The records of the only file there is."""
    (file,) = directory.wandb.glob("offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    return [json.loads(line) for line in done.stdout.splitlines()]


def rows(found: list[dict[str, Any]], name: str) -> list[tuple[int, float, float]]:
    """Step, value and time of each value of a curve."""
    items = [record["history"]["item"] for record in found if record["type"] == "history"]
    return [(item["iteration"], item[name], item["_timestamp"]) for item in items if name in item]


def exit_codes(found: list[dict[str, Any]]) -> list[int]:
    return [record["exit"].get("exit_code", 0) for record in found if record["type"] == "exit"]


def steps(events: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    return [(event["iteration"], event["loss"], event["time"]) for event in events if event["event"] == "step"]


@pytest.fixture(autouse=True)
def _away_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    # What the user's environment says of a server is of no use here.
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_PROJECT", "curves")


@pytest.mark.long
def test_wandb_reads_what_the_events_say(tmp_path: Path) -> None:
    """Also after a resume, which takes back steps that were written before."""
    lost = [START, *run_events(2)]
    directory = write_run(tmp_path / "run", recipe_plan(), lost)
    assert "wandb sync" in send(directory, "wandb")[0]
    found = records(directory)
    assert rows(found, "step/loss") == steps(lost)
    (run,) = [record["run"] for record in found if record["type"] == "run"]
    assert (run["project"], run["config"]["update"]["optimizer.learning_rate"]) == ("curves", 0.025)
    assert exit_codes(found) == [1]

    again = {**START, "attempt": 2, "iteration": 4, "time": 1_700_000_050.0}
    later = [{**event, "time": event["time"] + 100} for event in run_events()]
    # The epoch that ended with that step is evaluated again.
    last = later[[event.get("iteration") for event in later].index(4) + 1 :]
    with directory.events.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in [again, *last])
    send(directory, "wandb")
    found = records(directory)
    first = [row for row in steps(lost) if row[0] <= 4]
    assert rows(found, "step/loss") == first + steps(last)
    assert [step for step, *_ in rows(found, "epoch/test_accuracy")] == [4, 8, 12]
    assert exit_codes(found) == [0]


@pytest.mark.long
def test_it_is_private_and_holds_no_key(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", recipe_plan(), [START, *run_events()])
    send(directory, "wandb")
    files = [path for path in directory.path.rglob("*") if path.is_file()]
    assert not [path for path in files if os.environ["WANDB_API_KEY"].encode() in path.read_bytes()]
    assert len(files) > 5
    assert not directory.wandb.stat().st_mode & 0o077

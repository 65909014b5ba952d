"""Runs that are submitted to the local Slurm: what is asked of it, and how far they are."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psutil

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.records import read_records
from support.written_checkpoints import tensors_of

# One core a rank, as on the machine that the uninterrupted run has to itself: threads decide the last bits.
SIZE = ("--nodes", "2", "--tasks-per-node", "1", "--cpus-per-task", "1", "--gpus-per-node", "0")
TWO_NODES = ("--cluster", "auto", *SIZE)

Submit = Callable[..., CompletedProcess[str]]


def jobs_of(run: Path) -> list[str]:
    return [str(job) for job in json.loads((run / "submission.json").read_text())["jobs"]]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind, but for a last one that is still being written."""
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    return [event for line in lines if line.endswith("\n") and (event := json.loads(line))["event"] == kind]


def wait_until(what: str, condition: Callable[[], bool], timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
        time.sleep(0.02)


def wait_for_step(run: Path, iteration: int) -> None:
    path = run / "events.jsonl"
    wait_until(f"step {iteration}", lambda: path.exists() and len(events(run, "step")) >= iteration)


def wait_for_attempt(run: Path, number: int) -> None:
    """Until its ranks train."""
    path = run / "events.jsonl"
    wait_until(f"attempt {number}", lambda: path.exists() and len(events(run, "run")) >= number)


@contextlib.contextmanager
def held(run: Path, attempt: int = 1) -> Iterator[None]:
    """Let an attempt make some steps, and then none while the test does something to it."""
    wait_for_attempt(run, attempt)
    wait_for_step(run, len(events(run, "step")) + 5)
    ranks = [process for record in read_records(RunDirectory(run)).values() if (process := record.process())]
    assert len(ranks) == json.loads((run / "plan.json").read_text())["ranks"]
    for rank in ranks:
        rank.suspend()
    try:
        yield
    finally:
        for rank in ranks:
            # It may have been killed.
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.resume()


def wait_for_end(run: Path, timeout: float = 240) -> dict[str, object]:
    """The summary of a run that is done."""
    path = run / "summary.json"

    def is_done() -> bool:
        # A run that starts again removes the summary of its last attempt.
        with contextlib.suppress(FileNotFoundError):
            return bool(json.loads(path.read_text())["status"] == "done")
        return False

    wait_until("the end of the run", is_done, timeout)
    return json.loads(path.read_text())


def newest_state(run: Path) -> dict[str, bytes]:
    tensors = tensors_of(max((run / "checkpoints").glob("step-*")))
    return {name: tensor.tobytes() for name, tensor in tensors.items()}

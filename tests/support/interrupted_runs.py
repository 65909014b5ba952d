"""Runs that are interrupted while they train, and what must be the same as without."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import kept, read_events
from hpctrain.common.run.records import read_records
from support.written_checkpoints import tensors_of

BIN = Path(sys.executable).parent


@contextlib.contextmanager
def started(folder: Path, arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """``hpctrain run`` with both streams in a pipe; it ends with the test."""
    with subprocess.Popen(
        # As a module, since the environment of `make gpu` sees hpctrain without having its programs.
        [sys.executable, "-m", "hpctrain", "run", *arguments, "--run-dir", "run"],
        cwd=folder,
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def interrupted(folder: Path, steps: int, arguments: list[str], interrupt: Callable[[int], None]) -> tuple[int, str]:
    """Run hpctrain, interrupt it after some steps of this attempt; returns its exit status and what it printed."""
    events = folder / "run" / "events.jsonl"
    before = events.read_bytes().count(b'"event": "step"') if events.exists() else 0
    with started(folder, arguments) as process:
        deadline = time.monotonic() + 100
        while not events.exists() or events.read_bytes().count(b'"event": "step"') < before + steps:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=5)[0]
            time.sleep(0.02)
        interrupt(process.pid)
        output, _ = process.communicate(timeout=200)
    return process.returncode, output


@contextlib.contextmanager
def paused(run: Path) -> Iterator[None]:
    """The ranks make no step meanwhile, so that few epochs are long enough for the test to interrupt them.

    They look for the file that stops a run once a second, and so at the first step after this.
    """
    begin = time.monotonic()
    ranks = [process for record in read_records(RunDirectory(run)).values() if (process := record.process())]
    for rank in ranks:
        rank.suspend()
    try:
        yield
        time.sleep(max(0, begin + 1.1 - time.monotonic()))
    finally:
        for rank in ranks:
            rank.resume()


def ask(run: Path, launcher: int, number: signal.Signals) -> None:
    """Send a signal to the launcher, which asks the ranks to stop."""
    with paused(run):
        os.kill(launcher, number)
        deadline = time.monotonic() + 60
        while not (run / "stop").exists():
            assert time.monotonic() < deadline, f"{number.name} asked for no stop in 60 s"
            time.sleep(0.02)


def wait_for_steps(run: Path, *, attempt: int, steps: int) -> None:
    """Until that attempt has made so many."""
    deadline = time.monotonic() + 100
    while True:
        parts = (run / "events.jsonl").read_bytes().split(b'"event": "start"')
        if len(parts) > attempt and parts[attempt].count(b'"event": "step"') >= steps:
            return
        assert time.monotonic() < deadline, f"waited in vain for attempt {attempt}"
        time.sleep(0.02)


def parameters(run: Path) -> dict[str, np.ndarray]:
    return tensors_of(max((run / "checkpoints").glob("step-*")))


def numbers(run: Path) -> list[tuple[object, ...]]:
    """All that was measured and does not depend on time."""
    keys = ("iteration", "epoch", "loss", "learning_rate", "train_loss", "test_loss", "test_accuracy")
    events = kept(read_events(run / "events.jsonl"))
    return [tuple(getattr(event, key, None) for key in keys) for event in events if event.event in ("step", "epoch")]


def assert_same_bits(run: Path, whole: Path) -> None:
    one, other = parameters(run), parameters(whole)
    assert one.keys() == other.keys()
    assert {name for name in one if one[name].tobytes() != other[name].tobytes()} == set()
    assert numbers(run) == numbers(whole)

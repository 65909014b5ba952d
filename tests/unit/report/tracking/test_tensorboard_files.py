from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event, parse_event
from hpctrain.report.tracking import tensorboard_files
from hpctrain.report.tracking.sending import Trackers
from support.report.written_curves import send
from support.report.written_runs import recipe_plan, run_events, write_run


def _read(directory: RunDirectory) -> EventAccumulator:
    accumulator = EventAccumulator(str(directory.tensorboard), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def typed(lines: list[dict[str, Any]]) -> list[Event]:
    return [parse_event(json.dumps(line).encode(), "test") for line in lines]


def test_tensorboard_reads_what_the_events_say(finished: RunDirectory) -> None:
    send(finished, "tensorboard")
    accumulator = _read(finished)
    steps = [event for event in run_events() if event["event"] == "step"]
    epochs = [event for event in run_events() if event["event"] == "epoch"]

    for name in ("loss", "learning_rate"):
        scalars = accumulator.Scalars(f"step/{name}")
        assert [scalar.step for scalar in scalars] == [step["iteration"] for step in steps]
        assert [scalar.wall_time for scalar in scalars] == [step["time"] for step in steps]
        assert [scalar.value for scalar in scalars] == pytest.approx([step[name] for step in steps])
    speed = [scalar.value for scalar in accumulator.Scalars("step/samples_per_s")]
    assert speed == pytest.approx([64 / 5, *[128.0] * 11])
    share = [scalar.value for scalar in accumulator.Scalars("step/communication_share")]
    assert share == pytest.approx([0.8, *[0.2] * 11])

    for name in ("train_loss", "test_loss", "test_accuracy", "samples_per_s"):
        scalars = accumulator.Scalars(f"epoch/{name}")
        assert [scalar.step for scalar in scalars] == [4, 8, 12]
        assert [scalar.value for scalar in scalars] == pytest.approx([epoch[name] for epoch in epochs])


def test_a_further_attempt_takes_back_what_was_lost(tmp_path: Path) -> None:
    """Each attempt has its writer, and TensorBoard shows the repeated steps alone."""
    again = {"time": 1_800_000_000.0, "event": "start", "attempt": 2, "iteration": 4}
    last = [{**event, "time": event["time"] + 1e8} for event in run_events()[6:]]
    run = write_run(tmp_path / "run", recipe_plan(), run_events(2))
    for part in (typed(run_events(2)), typed([again, *last])):
        with Trackers(("tensorboard",), run, pytest.fail) as trackers:
            for event in part:
                trackers.give(event)
    assert len([*run.tensorboard.iterdir()]) == 2
    scalars = _read(run).Scalars("step/loss")
    assert [scalar.step for scalar in scalars] == [*range(1, 13)]
    assert [scalar.wall_time > 1.75e9 for scalar in scalars] == [False] * 4 + [True] * 8


@pytest.mark.long
def test_neither_tensorflow_nor_torch_is_imported(finished: RunDirectory) -> None:
    program = (
        "import sys; from pathlib import Path; from hpctrain.common.run.directory import RunDirectory\n"
        "from support.report.written_curves import send\n"
        "from hpctrain.report.page import write_report\n"
        "directory = RunDirectory(Path(sys.argv[1]))\n"
        "send(directory, 'tensorboard')\n"
        "write_report(directory)\n"
        "print({'tensorflow', 'torch', 'keras', 'mpi4py'} & set(sys.modules))\n"
    )
    paths = os.pathsep.join(filter(None, sys.path))
    output = subprocess.run(
        [sys.executable, "-c", program, finished.path],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert output.stdout.strip() == "set()"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_run(tmp_path / "run", recipe_plan(), run_events())
    monkeypatch.setattr(tensorboard_files, "private", lambda path, flags: os.open("/dev/full", os.O_WRONLY))
    (said,) = send(directory, "tensorboard")
    assert os.strerror(errno.ENOSPC) in said

"""Ranks in the pods of an Indexed Job, started by torchrun: pods that are lost, told to leave, and made again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.common.run.events import read_events
from support.interrupted_runs import assert_same_bits
from support.launching import Launch
from support.schedulers.local_pods import LocalJob, wait_for_steps, whatever_is_missing

pytest.importorskip("torch")

TRAINING = ["epochs=6"]
SET = [word for change in TRAINING for word in ("--set", change)]


@pytest.mark.long
def test_torchrun_starts_the_ranks_of_this_machine(hpctrain: Launch, tmp_path: Path) -> None:
    done = hpctrain("run", "digits", "-np", "2", "--launcher", "torchrun", "--set", "epochs=1", "--run-dir", "run")
    assert done.returncode == 0, done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["backend"], summary["ranks"]) == ("done", "gloo", 2)
    assert next(read_events(tmp_path / "run" / "events.jsonl")).launcher == "torchrun"


# On a machine that others use too, each of the four starts of PyTorch on two ranks may take a minute.
@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(whatever_is_missing()), reason=f"no pods here: {whatever_is_missing()}")
def test_pods_are_lost_and_told_to_leave(hpctrain: Launch, tmp_path: Path) -> None:
    whole = hpctrain("run", "digits", "-np", "2", *SET, "--backend", "gloo", "--run-dir", "whole")
    assert whole.returncode == 0, whole.stdout
    job = LocalJob(tmp_path, 2, TRAINING)
    with job.pods() as pods:
        wait_for_steps(job.run, pods, attempt=1, steps=30)
        pods[1].lose()
        # As the Job's controller does.
        pods[1] = job.start(1)
        wait_for_steps(job.run, pods, attempt=2, steps=5)
        pods[1].terminate()
        assert [pod.wait() for pod in pods] == [4, 4], job.said()
    said = job.said()
    assert json.loads((job.run / "summary.json").read_text())["status"] == "resumable", said
    assert "(restart 1" in said and "SIGTERM: " in said and " 96 s " in said
    with job.pods() as pods:
        assert [pod.wait() for pod in pods] == [0, 0], job.said()
    summary = json.loads((job.run / "summary.json").read_text())
    assert (summary["status"], summary["backend"], summary["ranks"]) == ("done", "gloo", 2)
    assert_same_bits(job.run, tmp_path / "whole")


@pytest.mark.skipif(bool(whatever_is_missing()), reason=f"no pods here: {whatever_is_missing()}")
def test_a_mistake_ends_all_pods_for_good(tmp_path: Path) -> None:
    job = LocalJob(tmp_path, 2, [])
    plan = tmp_path / "plan.json"
    text = plan.read_text()
    assert text.count("127.0.0.1:1,127.0.0.2:1") == 1
    plan.write_text(text.replace("127.0.0.1:1,127.0.0.2:1", "127.0.0.1:1"))
    with job.pods() as pods:
        assert pods[0].wait() == 2, job.said()
    assert "Traceback" not in job.said()

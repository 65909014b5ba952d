"""The main job: the digits recipe on two ranks, through the command line."""

from __future__ import annotations

import json

import pytest

from hpctrain.common.run.events import read_events


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_digits_on_two_ranks(hpctrain, tmp_path, framework):
    pytest.importorskip(framework)
    options = ["--framework", framework, "-np", "2", "--backend", "mpi", "--run-dir", "run"]
    result = hpctrain("run", "digits", *options, timeout=400)
    assert result.returncode == 0, result.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {key: summary[key] for key in ("status", "recipe", "framework", "backend", "ranks", "epochs", "steps")} == {
        "status": "done",
        "recipe": "digits",
        "framework": framework,
        "backend": "mpi",
        "ranks": 2,
        "epochs": 20,
        "steps": 460,
    }
    assert summary["metrics"]["test_accuracy"] >= 0.975
    assert f"{summary['metrics']['test_accuracy']:.4f}" in result.stdout
    loaded = {"torch": "PyTorch", "keras": "TensorFlow and Keras"}[framework]
    said = ["hpctrain: 2 ranks, backend mpi", "hpctrain: reading the data: digits", f"hpctrain: loading {loaded}\n"]
    places = [result.stdout.index(text) for text in said]
    assert places == sorted(places), "what takes its time is said in its order, by rank 0 alone"
    assert [result.stdout.count(text) for text in said] == [1, 1, 1]
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    assert [event.event for event in events].count("epoch") == 20


def test_horovod_reduces_behind_the_same_command(hpctrain, tmp_path):
    pytest.importorskip("torch")
    options = ["-np", "2", "--backend", "horovod", "--set", "epochs=2", "--run-dir", "run"]
    result = hpctrain("run", "digits", *options)
    assert result.returncode == 0, result.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["backend"], summary["ranks"], summary["steps"]) == ("done", "horovod", 2, 46)

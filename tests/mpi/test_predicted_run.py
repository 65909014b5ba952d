"""Real runs of the digits recipe beside their prediction."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

SHORT = ("digits", "-np", "2", "--framework", "torch", "--backend", "mpi", "--set", "epochs=2", "--run-dir", "run")


@pytest.mark.long
def test_what_a_run_took_stands_beside_its_prediction(hpctrain, tmp_path):
    done = hpctrain("run", *SHORT, "--gpu", "cpu")
    assert done.returncode == 0, done.stdout
    own = json.loads((tmp_path / "run" / "prediction.json").read_text())
    assert (own["recipe"], own["gpu"], own["engine"], own["gpus"], own["epochs"]["value"]) == (
        "digits",
        "cpu",
        "mpi",
        2,
        2,
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    figures = summary["predicted"]
    assert list(figures) == ["step_s", "samples_per_s", "communication_share", "minutes"]
    assert figures["samples_per_s"]["measured"] == summary["samples_per_s"]
    assert figures["minutes"]["measured"] == pytest.approx(summary["seconds"] / 60)
    assert figures["communication_share"]["measured"] == summary["communication_share"]
    assert 0 < figures["step_s"]["measured"] < summary["seconds"]
    for name, figure in figures.items():
        assert figure["low"] <= own[name]["value"] <= figure["high"]
        assert (name in summary["outside"]) == (not figure["low"] <= figure["measured"] <= figure["high"])
    assert "step (median)" in done.stdout


@pytest.mark.thorough
def test_a_run_without_one_gets_it_later(hpctrain, tmp_path):
    done = hpctrain("run", *SHORT)
    assert done.returncode == 0, done.stdout
    assert not (tmp_path / "run" / "prediction.json").exists()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["predicted"] is None
    made = hpctrain("predict", "digits", "--gpu", "cpu", "--nodes", "1,2", "--gpus-per-node", "2", "--json")
    text = made.stdout[made.stdout.index("{") : made.stdout.rindex("}") + 1]
    (tmp_path / "run" / "prediction.json").write_text(text)
    shown = hpctrain("report", "run")
    assert shown.returncode == 0, shown.stdout
    assert "step (median)" in shown.stdout
    assert "predicted" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.thorough
def test_a_script_s_network_is_not_known_before(hpctrain, tmp_path):
    (tmp_path / "train.py").write_text("print('hello')")
    done = hpctrain("run", "train.py", "-np", "1", "--backend", "single", "--gpu", "cpu", "--run-dir", "run")
    assert done.returncode == 0, done.stdout
    assert "no prediction: " in done.stdout
    assert not (tmp_path / "run" / "prediction.json").exists()

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events.kinds import EpochEvent
from hpctrain.report.summary import summarise
from support.report.written_runs import EPOCHS, STEPS, recipe_plan, run_events, script_plan, typed, write_run


def test_figures_of_a_finished_run(finished: RunDirectory) -> None:
    summary = summarise(finished, recipe_plan(), "done")
    assert summary == {
        "status": "done",
        "recipe": "digits",
        "script": None,
        "framework": "torch",
        "backend": "horovod",
        "ranks": 2,
        "epochs": EPOCHS,
        "steps": EPOCHS * STEPS,
        # The slow first step (5 s, 4 s of it in communication) is not in either.
        "samples_per_s": pytest.approx(128),
        "shared_gpus": False,
        "communication_share": pytest.approx(0.2),
        "gathered_bytes": 0,
        "data_share": pytest.approx(0.1),
        "seconds": 10.5,
        "survived": [],
        "energy_kwh": None,
        "energy_by_source": None,
        "joules_per_sample": None,
        "energy_covers": None,
        "metrics": {
            "train_loss": pytest.approx(2 / 3),
            "test_loss": pytest.approx(0.7),
            "test_accuracy": pytest.approx(0.9),
        },
    }


def test_one_step_is_all_there_is_to_measure(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", recipe_plan(), run_events()[:2])
    summary = summarise(directory, recipe_plan(), "failed")
    assert summary["samples_per_s"] == pytest.approx(64 / 5)
    assert summary["communication_share"] == pytest.approx(4 / 5)
    assert (summary["steps"], summary["epochs"], summary["metrics"], summary["seconds"]) == (1, 0, {}, None)


@pytest.mark.parametrize("events", [None, []])
def test_script_without_events(tmp_path: Path, events: list[dict[str, object]] | None) -> None:
    plan = script_plan().model_copy(update={"backend": "auto"})
    summary = summarise(write_run(tmp_path / "run", plan, events), plan, "done")
    assert (summary["status"], summary["script"], summary["ranks"], summary["metrics"]) == ("done", "train.py", 2, {})
    unknown = ("recipe", "framework", "backend", "epochs", "steps", "samples_per_s", "communication_share", "seconds")
    assert [summary[key] for key in unknown] == [None] * len(unknown)


def test_metrics_are_what_json_can_hold() -> None:
    epoch = {"time": 1.0, "event": "epoch", "epoch": 1, "seconds": 1.0, "samples_per_s": 2.0, "test_accuracy": 0.25}
    read = typed({**epoch, "test_loss": float("nan"), "train_loss": float("inf"), "test_top5": 0.5})
    assert isinstance(read, EpochEvent)
    values = read.metrics
    assert values == {"test_loss": None, "train_loss": None, "test_accuracy": 0.25, "test_top5": 0.5}
    json.dumps(values, allow_nan=False)


@pytest.mark.parametrize("peak", [None, 1e6])
def test_text_has_tokens_and_on_known_gpus_their_utilisation(tmp_path: Path, peak: float | None) -> None:
    first, *rest = run_events()
    events = [{**first, "tokens": 32, "flops": 500, "peak_flops": peak}, *rest]
    summary = summarise(write_run(tmp_path / "run", recipe_plan(), events), recipe_plan(), "done")
    assert summary["tokens_per_s"] == pytest.approx(128 * 32)
    # Of two ranks.
    assert summary.get("flops_utilisation") == (peak and pytest.approx(128 * 500 / 2e6))

"""Runs in a database of MLflow's, read back by its own client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.report.tracking.curves import parameters, texts
from support import needs
from support.report.written_curves import send
from support.report.written_runs import recipe_plan, run_events, write_run

pytestmark = [needs.mlflow, pytest.mark.slow]

START = {"time": 1_700_000_000.0, "event": "start", "attempt": 1, "iteration": 0}


def points(events: list[dict[str, Any]], name: str) -> list[tuple[int, float, int]]:
    """Step, value and milliseconds of the steps of written events."""
    steps = [event for event in events if event["event"] == "step"]
    return [(event["iteration"], event[name], round(event["time"] * 1000)) for event in steps]


@pytest.mark.long
def test_run_parameters_and_curves_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes with a resume is added to the run that is there."""
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "read back")
    client = MlflowClient()

    def only_run() -> Any:
        (run,) = client.search_runs([client.get_experiment_by_name("read back").experiment_id])
        return run

    def history(name: str) -> list[tuple[int, float, int]]:
        found = client.get_metric_history(only_run().info.run_id, name)
        return sorted((each.step, each.value, each.timestamp) for each in found)

    written = [START, *run_events(2)]
    directory = write_run(tmp_path / "digits-1", recipe_plan(), written)
    send(directory, "mlflow")
    run = only_run()
    assert (run.info.run_name, run.info.status, run.info.start_time) == ("digits-1", "RUNNING", 1_700_000_000_000)
    assert run.data.params == texts(parameters(recipe_plan()))
    assert run.data.tags.items() >= {"ranks": "2", "backend": "horovod", "model_parameters": "12345"}.items()
    for name in ("loss", "learning_rate", "seconds"):
        assert history(f"step/{name}") == points(written, name)

    again = {**START, "attempt": 2, "iteration": 8, "time": 1_700_000_050.0}
    last = [{**event, "time": 100.0 + event["time"]} for event in run_events()][-6:]
    assert last[0]["iteration"] == 9
    with directory.events.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in [again, *last])
    send(directory, "mlflow")
    assert (only_run().info.status, only_run().info.end_time) == ("FINISHED", 1_700_000_116_000)
    assert history("step/loss") == points([*written, *last], "loss")
    assert [step for step, *_ in history("epoch/test_accuracy")] == [4, 8, 12]

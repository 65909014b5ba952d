"""Runs on a real MLflow server, read back through its own interface."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.report.tracking.mlflow_server import MlflowServer, mlflow_server

from hpctrain.cli.main import main
from hpctrain.report.tracking.parameters import parameters, texts
from support import needs
from support.report.written_runs import recipe_plan, run_events, write_run

pytestmark = [needs.mlflow, pytest.mark.slow]

START = {"time": 1_700_000_000.0, "event": "start", "attempt": 1, "iteration": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow") / "server") as found:
        yield found


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server on a busy machine may take longer than one that is nothing but a server."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")


def points(events: list[dict[str, object]], name: str) -> list[tuple[int, float, int]]:
    """Step, value and milliseconds of the steps of written events."""
    found = [(event["iteration"], event[name], event["time"]) for event in events if event["event"] == "step"]
    return [(int(str(step)), float(str(value)), round(float(str(at)) * 1000)) for step, value, at in found]


@pytest.mark.long
def test_run_parameters_and_curves_are_read_back(
    server: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sent twice they are there once; what comes with a resume is added; an address's password is written nowhere."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address.replace("://", "://anna:geheim@"))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "read back")
    written = [START, *run_events(2)]
    directory = write_run(tmp_path / "digits-1", recipe_plan(), written)
    for _ in range(2):
        assert main(["report", str(directory.path), "--tracking", "mlflow"]) == 0
    (run,) = server.runs()
    assert (run["info"]["run_name"], run["info"]["status"]) == ("digits-1", "RUNNING")
    assert run["info"]["start_time"] == 1_700_000_000_000
    told = {param["key"]: param["value"] for param in run["data"]["params"]}
    assert told == texts(parameters(recipe_plan()))
    tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
    assert (tags["ranks"], tags["backend"], tags["model_parameters"]) == ("2", "horovod", "12345")
    for name in ("loss", "learning_rate", "seconds"):
        assert server.history(run, f"step/{name}") == points(written, name)

    again = {**START, "attempt": 2, "iteration": 8, "time": 1_700_000_050.0}
    last = [{**event, "time": 100.0 + float(event["time"])} for event in run_events()][-6:]
    assert last[0]["iteration"] == 9
    with directory.events.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in [again, *last])
    assert main(["report", str(directory.path), "--tracking", "mlflow"]) == 0
    (run,) = server.runs()
    assert (run["info"]["status"], run["info"]["end_time"]) == ("FINISHED", 1_700_000_117_000)
    assert server.history(run, "step/loss") == points([*written, *last], "loss")
    assert [step for step, *_ in server.history(run, "epoch/test_accuracy")] == [4, 8, 12]
    output = capsys.readouterr()
    assert f"{server.address}/#/experiments/" in output.err
    files = [path.read_text() for path in directory.path.rglob("*") if path.is_file()]
    assert "geheim" not in "".join([output.out, output.err, *files])


@pytest.mark.long
def test_another_server_gets_all_of_it(server: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does where the run was deleted: how much was sent is known of each run of a server."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
    directory = write_run(tmp_path / "moved", recipe_plan(), [START, *run_events()])
    for _ in range(2):
        assert main(["report", str(directory.path), "--tracking", "mlflow"]) == 0
        (run,) = [run for run in server.runs() if run["info"]["run_name"] == "digits moved"]
        assert len(server.history(run, "step/loss")) == 12
        server.ask("runs/delete", {"run_id": run["info"]["run_id"]})

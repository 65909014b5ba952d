"""Runs on a real MLflow server, read back through its own interface."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.report.tracking.mlflow_server import MlflowServer, mlflow_server

from hpctrain.cli.main import main
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import read_events
from hpctrain.common.run.events.kinds import LogEvent
from hpctrain.report.tracking.parameters import parameters, texts
from support import needs
from support.report.written_runs import recipe_plan, run_events, write_run

pytestmark = [needs.mlflow, pytest.mark.slow]

START = {"time": 1_700_000_000.0, "event": "start", "attempt": 1, "iteration": 0}
# Logs until it is told to end; its own clock says how long each of that took.
SCRIPT = """
import pathlib, sys, time
import hpctrain as ht
ht.init()
end, longest, step = pathlib.Path(sys.argv[1]), 0.0, 0
while not end.exists():
    step, began = step + 1, time.monotonic()
    ht.log({"loss": 1 / step, "acc@5": step / 7}, step=step)
    longest = max(longest, time.monotonic() - began)
    time.sleep(0.05)
end.write_text(f"{step} {longest}")
"""


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


class Run:
    """``hpctrain run`` of the script, in a process of its own."""

    def __init__(self, folder: Path, address: str) -> None:
        (folder / "logs.py").write_text(SCRIPT)
        self._end = folder / "end"
        self._err = folder / "err"
        self.directory = RunDirectory(folder / "run")
        command = ["run", str(folder / "logs.py"), "--backend", "single", "-np", "1", "--tracking", "mlflow"]
        with self._err.open("wb") as err:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "hpctrain",
                    *command,
                    "--run-dir",
                    str(self.directory.path),
                    "--",
                    str(self._end),
                ],
                env={**os.environ, "MLFLOW_TRACKING_URI": address},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        # It ends its own processes; the one for MLflow ends with its input.
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(timeout=60)

    def end(self) -> float:
        """Let the script end; returns the seconds until ``hpctrain run`` had ended."""
        self._end.touch()
        began = time.monotonic()
        assert self._process.wait(timeout=120) == 0, self.said
        return time.monotonic() - began

    @property
    def said(self) -> str:
        return self._err.read_text()

    @property
    def logged(self) -> list[LogEvent]:
        events = read_events(self.directory.events) if self.directory.events.exists() else iter(())
        return [event for event in events if isinstance(event, LogEvent)]

    @property
    def longest(self) -> float:
        """The longest time that a log took, in seconds."""
        steps, longest = self._end.read_text().split()
        assert int(steps) == len(self.logged)
        return float(longest)

    def wait_for(self, what: str, seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while what not in self.said:
            assert self._process.poll() is None, self.said
            assert time.monotonic() < deadline, f"no {what!r} in {seconds:g} s: {self.said}"
            time.sleep(0.1)

    def wait_for_steps(self, count: int, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while len(self.logged) < count:
            assert time.monotonic() < deadline, f"{len(self.logged)} of {count} steps in {seconds:g} s: {self.said}"
            time.sleep(0.1)


def sent(server: MlflowServer, name: str) -> list[tuple[int, float, int]]:
    runs = [run for run in server.runs() if run["data"]["params"][0]["value"] and "logs.py" in run["info"]["run_name"]]
    return server.history(runs[-1], name) if runs else []


def curve(run: Run, name: str) -> list[tuple[int, float, int]]:
    found = [(event.iteration, event.values[name], round(event.time * 1000)) for event in run.logged]
    return [(step, value, at) for step, value, at in found if value is not None]


@pytest.mark.thorough
def test_a_server_that_is_killed_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    with mlflow_server(tmp_path / "server") as server, Run(tmp_path, server.address) as run:
        run.wait_for(f"{server.address}/#/experiments/")
        run.wait_for_steps(len(run.logged) + 20)
        server.kill()
        before = len(run.logged)
        run.wait_for("gets no more of this run")
        # Faster than any server could have been waited for.
        run.wait_for_steps(before + 40)
        run.end()
        assert run.longest < 5
        assert "not have" in run.said
        server.start()
        assert 0 < len(sent(server, "loss")) < len(run.logged)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
        assert main(["report", str(run.directory.path), "--tracking", "mlflow"]) == 0
        assert sent(server, "loss") == curve(run, "loss")
        assert sent(server, "acc_5") == curve(run, "acc@5")
        (found,) = server.runs()
        assert found["info"]["status"] == "FINISHED"


@contextlib.contextmanager
def _silent_server() -> Iterator[str]:
    """A server that takes each connection and never says a word."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        done = threading.Event()

        def take() -> None:
            while not done.is_set():
                with contextlib.suppress(TimeoutError):
                    taken.append(listener.accept()[0])

        thread = threading.Thread(target=take)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            assert taken, "nobody asked"
        finally:
            done.set()
            thread.join()
            for each in taken:
                each.close()


@pytest.mark.thorough
def test_a_server_that_hangs_slows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _silent_server() as address, Run(tmp_path, address) as run:
        run.wait_for_steps(40)
        assert run.end() < 60
        assert run.longest < 5
        assert "hpctrain report" in run.said
        assert json.loads(run.directory.summary.read_text())["status"] == "done"

"""A real MLflow server for tests: MLflow's own application with its database, on a port of its own.

``mlflow server`` serves the same application together with a gateway and assistants for language models, whose packages
are three times as large.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.ports import free_port

_START_SECONDS = 240.0
_PROGRAM = """
import os, sys
folder, port = sys.argv[1:]
os.environ["_MLFLOW_SERVER_FILE_STORE"] = f"sqlite:///{folder}/mlflow.db"
os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = f"{folder}/artifacts"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
from mlflow.server import app
app.run(host="127.0.0.1", port=int(port), threaded=True)
"""


class MlflowServer:
    """A server that runs until it is killed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        with (folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(folder), str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            said = (folder / "server.log").read_text(errors="replace")[-3000:]
            assert self._process.poll() is None, f"the MLflow server ended: {said}"
            assert time.monotonic() < deadline, f"the MLflow server did not answer in {_START_SECONDS:g} s: {said}"
            time.sleep(0.2)

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait(timeout=30)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer of the server's REST API."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.address}/api/2.0/mlflow/{path}", data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return dict(json.load(answer))

    def runs(self) -> list[dict[str, Any]]:
        """All runs of all experiments."""
        experiments = self.ask("experiments/search", {"max_results": 100})["experiments"]
        names = [experiment["experiment_id"] for experiment in experiments]
        return list(self.ask("runs/search", {"experiment_ids": names, "max_results": 100}).get("runs", []))

    def history(self, run: dict[str, Any], name: str) -> list[tuple[int, float, int]]:
        """Step, value and time in milliseconds of each of a metric's values, in order."""
        answer = self.ask(f"metrics/get-history?run_id={run['info']['run_id']}&metric_key={name}&max_results=20000")
        found = [(each["step"], each["value"], each["timestamp"]) for each in answer.get("metrics", [])]
        return sorted((int(step), float(value), int(at)) for step, value, at in found)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False


@contextlib.contextmanager
def mlflow_server(folder: Path) -> Iterator[MlflowServer]:
    """A server that runs while the block does, and leaves nothing."""
    server = MlflowServer(folder)
    try:
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)

"""Writes what tests/gpu found out to the folder that GPU_REPORT names: gpu.json, and index.html to look at."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch

import hpctrain

REPORT = "GPU_REPORT"
_PACKAGES = ("torch", "horovod", "mpi4py", "nvidia-nccl-cu13")


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``note(key=value, …)`` adds figures to this test's entry in the report."""

    def add(**found: Any) -> None:
        # A worker of pytest can send plain types only.
        request.node.user_properties += json.loads(json.dumps(found, default=float)).items()

    return add


class _Report:
    """What became of each test, as pytest's own process hears of it, whichever worker ran it."""

    def __init__(self) -> None:
        self._checks: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.location[2]
        if not report.nodeid.startswith("tests/gpu/") or (report.when != "call" and report.passed):
            return
        if report.skipped and isinstance(report.longrepr, tuple):
            why = report.longrepr[2].removeprefix("Skipped: ")
        else:
            why = str(report.longrepr or "")
        entry = {"name": name.removeprefix("test_").replace("_", " "), "outcome": report.outcome, "why": why}
        self._checks.append({**entry, "seconds": round(report.duration, 1), "found": dict(report.user_properties)})

    def pytest_sessionfinish(self) -> None:
        if folder := os.environ.get(REPORT):
            _write(Path(folder), self._checks)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Report())


def _write(folder: Path, checks: list[dict[str, Any]]) -> None:
    result = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "machine": _machine(), "checks": checks}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(result, indent=2) + "\n")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, loader=jinja2.FileSystemLoader(Path(__file__).parent)
    )
    (folder / "index.html").write_text(environment.get_template("page.html.jinja").render(result))


def _machine() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "GPUs": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
        "CUDA of PyTorch": torch.version.cuda,
        "cores": len(os.sched_getaffinity(0)),
        "Python": platform.python_version(),
        "hpctrain": hpctrain.__version__,
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

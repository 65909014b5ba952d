"""Writes what tests/gpu found out to gpu.json in the folder that GPU_REPORT names.

Each check is written as it ends, so that what was ended early keeps what it had. A section is a module; one that runs
again replaces its own part of the file and leaves the others.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

import hpctrain
from support.gpu_runs import REPORT

_PACKAGES = ("torch", "torchvision", "horovod", "mpi4py", "deepspeed", "lightning", "accelerate", "nvidia-nccl-cu13")


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``note(key=value, …)`` adds figures to this test's entry in the report; a list of dicts becomes a table."""

    def add(**found: Any) -> None:
        # A worker of pytest can send plain types only.
        request.node.user_properties += json.loads(json.dumps(found, default=float)).items()

    return add


def pytest_configure(config: pytest.Config) -> None:
    folder = os.environ.get(REPORT)
    if folder and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(Path(folder)))


class Report:
    """What became of each test, as pytest's own process hears of it, whichever worker ran it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._began: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = Path(report.location[0])
        if path.parent.name != "gpu" or (report.when != "call" and report.passed):
            return
        if report.skipped and isinstance(report.longrepr, tuple):
            why = report.longrepr[2].removeprefix("Skipped: ")
        else:
            why = str(report.longrepr or "")
        entry = {
            "name": report.location[2].removeprefix("test_").replace("_", " "),
            "outcome": report.outcome,
            "why": why,
            "seconds": round(report.duration, 1),
            "found": dict(report.user_properties),
        }
        self._add(path.stem.removeprefix("test_"), entry)

    def _add(self, section: str, entry: dict[str, Any]) -> None:
        file = self._folder / "gpu.json"
        sections: dict[str, Any] = json.loads(file.read_text())["sections"] if file.exists() else {}
        if section not in self._began:
            self._began.add(section)
            date = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
            sections[section] = {"date": date, "machine": machine(), "checks": []}
        sections[section]["checks"].append(entry)
        write(self._folder, {"sections": sections})


def write(folder: Path, result: dict[str, Any]) -> None:
    """Write the report; whoever is interrupted leaves the file as it was."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / ".gpu.json.new"
    new.write_text(json.dumps(result, indent=2) + "\n")
    new.replace(folder / "gpu.json")


def machine() -> dict[str, Any]:
    """What the figures are of."""
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

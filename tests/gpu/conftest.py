"""Writes what tests/gpu found out to gpu.json in the folder that GPU_REPORT names.

Each check is written as it ends, so that what was ended early keeps what it had. A section that runs again replaces its
own part of the file and leaves the others.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

import hpctrain
from support.gpu_sections import MINUTES, REPORT, chosen, is_over, left, section_of

_HERE = Path(__file__).parent
_PACKAGES = ("torch", "torchvision", "horovod", "mpi4py", "deepspeed", "lightning", "accelerate", "nvidia-nccl-cu13")


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``note(key=value, …)`` adds figures to this test's entry in the report; a list of dicts becomes a table."""

    def add(**found: Any) -> None:
        # A worker of pytest can send plain types only.
        request.node.user_properties += json.loads(json.dumps(found, default=float)).items()

    return add


def pytest_configure(config: pytest.Config) -> None:
    chosen()
    folder = os.environ.get(REPORT)
    if folder and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(Path(folder)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = [item for item in items if _is_ours(item) and section_of(item.path) not in chosen()]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A check has the time that its section has left, where that is less than its own."""
    if _is_ours(item) and os.environ.get(REPORT):
        item.add_marker(pytest.mark.timeout(max(1.0, left(section_of(item.path)))), append=False)
    return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _is_ours(item) and os.environ.get(REPORT) and is_over(section_of(item.path)):
        pytest.skip(_CUT)


_CUT = "cut: the minutes of its section were over"


def _is_ours(item: pytest.Item) -> bool:
    return item.path.parent == _HERE


class Report:
    """What became of each test, as pytest's own process hears of it, whichever worker ran it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._began: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = Path(report.location[0])
        if path.parent.name != "gpu" or (report.when != "call" and report.passed):
            return
        section = section_of(path)
        if report.skipped and isinstance(report.longrepr, tuple):
            why = report.longrepr[2].removeprefix("Skipped: ")
        else:
            why = str(report.longrepr or "")
        outcome = "cut" if why == _CUT or (report.failed and is_over(section)) else report.outcome
        entry = {"name": report.location[2].removeprefix("test_").replace("_", " "), "outcome": outcome, "why": why}
        self._add(section, {**entry, "seconds": round(report.duration, 1), "found": dict(report.user_properties)})

    def _add(self, section: str, entry: dict[str, Any]) -> None:
        file = self._folder / "gpu.json"
        sections: dict[str, Any] = json.loads(file.read_text())["sections"] if file.exists() else {}
        if section not in self._began:
            self._began.add(section)
            date = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
            sections[section] = {"date": date, "machine": machine(), "minutes": MINUTES[section], "checks": []}
        sections[section]["checks"].append(entry)
        write(self._folder, {"sections": {name: sections[name] for name in MINUTES if name in sections}})


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

"""Writes what tests/gpu found out to the folder that GPU_REPORT names: gpu.json, and index.html to look at."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Callable, Generator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch

import hpctrain

REPORT = "GPU_REPORT"
_PACKAGES = ("torch", "horovod", "mpi4py", "nvidia-nccl-cu13")
_found = pytest.StashKey[dict[str, Any]]()
_checks = pytest.StashKey[list[dict[str, Any]]]()


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``note(key=value, …)`` adds figures to this test's entry in the report."""
    request.node.stash[_found] = {}
    update: Callable[..., None] = request.node.stash[_found].update
    return update


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_checks] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" or not report.passed:
        if report.skipped and isinstance(report.longrepr, tuple):
            why = report.longrepr[2].removeprefix("Skipped: ")
        else:
            why = str(report.longrepr or "")
        name = item.name.removeprefix("test_").replace("_", " ")
        entry = {"name": name, "outcome": report.outcome, "why": why, "seconds": round(report.duration, 1)}
        if item.path.parent == Path(__file__).parent:
            item.config.stash[_checks].append({**entry, "found": item.stash.get(_found, {})})
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if folder := os.environ.get(REPORT):
        _write(Path(folder), session.config.stash[_checks])


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

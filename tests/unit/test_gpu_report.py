"""The report of ``make gpu``: each check as it ends, section by section."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.imported_programs import imported


def outcome(name: str, when: str = "call", result: str = "passed", **found: Any) -> pytest.TestReport:
    node = f"tests/gpu/test_engines.py::test_{name}"
    place = ("tests/gpu/test_engines.py", 1, f"test_{name}")
    return pytest.TestReport(node, place, {}, result, None, when, duration=1.23, user_properties=[*found.items()])


def test_each_check_is_written_as_it_ends(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    written = imported(Path(__file__).parents[1] / "gpu" / "conftest.py")

    def checks() -> list[tuple[str, str]]:
        found = json.loads((tmp_path / "gpu.json").read_text())["sections"]["engines"]["checks"]
        return [(check["name"], check["outcome"]) for check in found]

    report = written.Report(tmp_path)
    report.pytest_runtest_logreport(outcome("one", "setup"))
    assert not [*tmp_path.iterdir()]
    report.pytest_runtest_logreport(outcome("one", table=[{"case": "tp", "apart": 1e-16}], figure=3))
    assert checks() == [("one", "passed")]
    report.pytest_runtest_logreport(outcome("two<b>", result="failed"))
    assert checks() == [("one", "passed"), ("two<b>", "failed")]
    # Another run of the section replaces its part.
    written.Report(tmp_path).pytest_runtest_logreport(outcome("one"))
    assert checks() == [("one", "passed")]
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]

"""The report of ``make gpu``: each check as it ends, section by section, and what had no time left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import gpu_sections
from support.gpu_sections import MINUTES, chosen, left, section_of
from support.imported_programs import imported

ROOT = Path(__file__).parents[2]


def outcome(name: str, when: str = "call", result: str = "passed", **found: Any) -> pytest.TestReport:
    node = f"tests/gpu/test_engines.py::test_{name}"
    place = ("tests/gpu/test_engines.py", 1, f"test_{name}")
    return pytest.TestReport(node, place, {}, result, None, when, duration=1.23, user_properties=[*found.items()])


def test_sections_are_the_modules() -> None:
    assert {section_of(path) for path in (ROOT / "tests" / "gpu").glob("test_*.py")} == {*MINUTES}
    assert all(minutes <= 10 for minutes in MINUTES.values())


def test_the_sections_that_were_asked_for() -> None:
    assert chosen({}) == chosen({"GPU_ONLY": ""}) == [*MINUTES]
    assert chosen({"GPU_ONLY": "engines, "}) == ["engines"]
    with pytest.raises(pytest.UsageError) as caught:
        chosen({"GPU_ONLY": "engines,bogus"})
    assert "bogus" in str(caught.value) and all(name in str(caught.value) for name in MINUTES)


def test_each_check_is_written_as_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(gpu_sections, "_began", {})
    written = imported(ROOT / "tests" / "gpu" / "conftest.py")

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
    # What fails when the time of its section is over was cut, and so was what could not begin.
    monkeypatch.setitem(gpu_sections._began, "engines", -1e9)
    assert left("engines") < 0
    report.pytest_runtest_logreport(outcome("three", result="failed"))
    assert checks()[2] == ("three", "cut")
    # Another run of the section replaces its part.
    written.Report(tmp_path).pytest_runtest_logreport(outcome("one"))
    assert checks() == [("one", "passed")]
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.common.run.directory import RunDirectory
from support.report.written_runs import recipe_plan, run_events, write_run


@pytest.fixture
def finished(tmp_path: Path) -> RunDirectory:
    """A recipe's run that came to its end."""
    return write_run(tmp_path / "run", recipe_plan(), run_events())


@pytest.fixture
def drawn() -> None:
    """For tests that look at the curves themselves."""


@pytest.fixture(autouse=True)
def _quick_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing a curve takes a tenth of a second and more."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("hpctrain.report.plots._picture", lambda title, lines, **_: "<svg></svg>")

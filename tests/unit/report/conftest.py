from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.common.run.directory import RunDirectory
from support.report.written_runs import recipe_plan, run_events, write_run


@pytest.fixture
def finished(tmp_path: Path) -> RunDirectory:
    """A recipe's run that came to its end."""
    return write_run(tmp_path / "run", recipe_plan(), run_events())

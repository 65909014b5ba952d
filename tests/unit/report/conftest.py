from __future__ import annotations

from pathlib import Path

import pytest
from written_runs import recipe_plan, run_events, write_run

from hpctrain.common.run.directory import RunDirectory


@pytest.fixture
def finished(tmp_path: Path) -> RunDirectory:
    """A recipe's run that came to its end."""
    return write_run(tmp_path / "run", recipe_plan(), run_events())

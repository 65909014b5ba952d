"""A rank that is slower than the others is named while the run goes on, with what of it takes longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import read_events
from hpctrain.common.run.events.kinds import SlowRankEvent

_PROGRAM = Path(__file__).parent / "programs" / "slow_rank.py"
_HPCTRAIN = Path(sys.executable).parent / "hpctrain"
_EVERY = 20


@pytest.mark.parametrize(("what", "cause"), [("samples", "samples"), ("computing", "computing"), ("nothing", None)])
def test_a_slow_rank_is_named_with_its_cause_within_two_comparisons(tmp_path: Path, what: str, cause: str | None):
    run = tmp_path / "run"
    start = [str(_HPCTRAIN), "run", str(_PROGRAM), "-np", "2", "--backend", "mpi", "--run-dir", str(run)]
    done = subprocess.run([*start, "--", what, str(_EVERY)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [event for event in read_events(RunDirectory(run).events) if isinstance(event, SlowRankEvent)]
    assert [(event.rank, event.cause) for event in found] == ([(1, cause)] if cause else [])
    if cause:
        # The first steps are too few for a comparison.
        assert found[0].iteration <= 3 * _EVERY
        assert found[0].text in done.stderr

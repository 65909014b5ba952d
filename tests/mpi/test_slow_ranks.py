"""A rank that is slower than the others is named while the run goes on, with what of it takes longer."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import read_events
from hpctrain.common.run.events.kinds import SlowRankEvent

_PROGRAM = Path(__file__).parent / "programs" / "slow_rank.py"
_HPCTRAIN = Path(sys.executable).parent / "hpctrain"
_EVERY = 20


def _slow_ranks(run: Path, *arguments: str) -> tuple[list[SlowRankEvent], str]:
    """The ranks that two ranks of the program named, and what the run said."""
    start = [str(_HPCTRAIN), "run", str(_PROGRAM), "-np", "2", "--backend", "mpi", "--run-dir", str(run)]
    done = subprocess.run([*start, "--", *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [event for event in read_events(RunDirectory(run).events) if isinstance(event, SlowRankEvent)], done.stderr


@pytest.mark.parametrize(("what", "cause"), [("samples", "samples"), ("computing", "computing"), ("nothing", None)])
def test_a_slow_rank_is_named_with_its_cause_within_two_comparisons(tmp_path: Path, what: str, cause: str | None):
    found, said = _slow_ranks(tmp_path / "run", what, str(_EVERY))
    assert [(event.rank, event.cause) for event in found] == ([(1, cause)] if cause else [])
    if cause:
        # The first steps are too few for a comparison.
        assert found[0].iteration <= 3 * _EVERY
        assert found[0].text in said


@pytest.fixture
def quota() -> Iterator[Path]:
    """A control group whose processes get a twentieth of a processor, less than a busy machine leaves to the others."""
    mounts = Path("/sys/fs/cgroup")
    second = (mounts / "cgroup.controllers").exists()
    group = (mounts if second else mounts / "cpu") / f"hpctrain-{secrets.token_hex(4)}"
    try:
        group.mkdir()
        if second:
            (group / "cpu.max").write_text("5000 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text("5000")
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    # A run that took too long has left its ranks.
    for process in map(psutil.Process, map(int, (group / "cgroup.procs").read_text().split())):
        process.kill()
        process.wait(30)
    group.rmdir()


def test_a_rank_with_a_quota_of_its_processor_is_named_for_its_computing(tmp_path: Path, quota: Path):
    found, _ = _slow_ranks(tmp_path / "run", "quota", str(_EVERY), str(quota))
    assert [(event.rank, event.cause) for event in found] == [(1, "computing")]
    assert found[0].iteration <= 3 * _EVERY

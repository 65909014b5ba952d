"""What Slurm's accounting says that jobs drew."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.control.schedulers.slurm.slurm_scheduler import Slurm
from support.schedulers.slurm_programs import NO_ACCOUNTING, install, prints


def test_jobs_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SACCT_FORMAT", "JobName")
    # The second has not been measured, and says so in one of two ways.
    calls = install(tmp_path, monkeypatch, sacct=prints("3600000\n\n0\n1800000\n"))
    assert Slurm().joules(["7", "8_2"], seconds=10.0) == 5_400_000
    command = "sacct --allocations --noheader --parsable2 --format=ConsumedEnergyRaw --jobs=7,8_2"
    assert calls.read_text() == f"{command}\n"


@pytest.mark.parametrize(
    "sacct", [NO_ACCOUNTING, prints("0\n"), prints("\n"), prints("18446744073709551614\n"), prints("5 J\n")]
)
def test_nothing_was_measured(sacct: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, sacct=sacct)
    assert Slurm().joules(["7"], seconds=10.0) is None


def test_no_slurm_and_no_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install(tmp_path, monkeypatch, sacct=prints("5\n"))
    assert Slurm().joules([], seconds=10.0) is None and calls.read_text() == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Slurm().joules(["7"], seconds=10.0) is None


def test_an_accounting_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, sacct="exec sleep 3600")
    assert Slurm().joules(["7"], seconds=0.2) is None

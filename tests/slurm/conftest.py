"""A real Slurm of four nodes, and the command line as its user has it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from support.launching import AS_ROOT, Launch
from support.slurm import local_slurm
from support.slurm.local_slurm import LocalSlurm
from support.slurm.submitted_runs import Submit


@pytest.fixture(scope="session")
def slurm() -> Iterator[LocalSlurm]:
    """A cluster of nodes n1 to n4; jobs that a test leaves are its own to cancel."""
    if reason := local_slurm.obstacle():
        pytest.skip(reason)
    with LocalSlurm() as cluster:
        yield cluster


@pytest.fixture
def slurm_hpctrain(slurm: LocalSlurm, hpctrain: Launch) -> Launch:
    """``slurm_hpctrain("submit", "digits", …)``: the fixture ``hpctrain`` with the cluster's environment."""
    return partial(hpctrain, **AS_ROOT, **slurm.environment)


@pytest.fixture
def slurm_main(
    slurm: LocalSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Launch:
    """As ``slurm_hpctrain``, in this process, whose start took longer than most commands; waits ask more often."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for name, value in {**AS_ROOT, **slurm.environment, "PATH": path}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpctrain.control.schedulers.run_jobs._ASK_SECONDS", 0.2)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        code = main(arguments)
        said = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, code, said.out + said.err)

    return run


@pytest.fixture
def submit(slurm: LocalSlurm, slurm_hpctrain: Launch) -> Iterator[Submit]:
    """``submit("digits", …)``; what still runs of it is cancelled after the test."""
    yield lambda *arguments, timeout=300: slurm_hpctrain("submit", *arguments, timeout=timeout)
    slurm.run("scancel", "--user=root", "--full")
    slurm.wait_idle()

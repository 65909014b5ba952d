"""A real Slurm of four nodes, and the command line as its user has it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import local_slurm
import pytest
from launching import Launch
from local_slurm import LocalSlurm
from submitted_runs import Submit


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
    return partial(hpctrain, **local_slurm.AS_ROOT, **slurm.environment)


@pytest.fixture
def submit(slurm: LocalSlurm, slurm_hpctrain: Launch) -> Iterator[Submit]:
    """``submit("digits", …)``; what still runs of it is cancelled after the test."""
    yield lambda *arguments, timeout=300: slurm_hpctrain("submit", *arguments, timeout=timeout)
    slurm.run("scancel", "--user=root", "--full")
    slurm.wait_idle()

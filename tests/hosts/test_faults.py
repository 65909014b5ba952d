"""Faults of the network at the worst moments, while ranks and what starts them look for each other.

``python tests/fault_campaign/campaign.py --only hosts`` has all kinds, at all moments.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from fault_campaign import campaign, kinds_of_hosts
from fault_campaign.cases import KINDS, Case
from fault_campaign.references import Library
from support.hosts.local_hosts import LocalHosts

pytest.importorskip("torch")

# Each with a seed that draws the moment.
CASES = {
    # All ranks but that host's wait in MPI_Init, which has no limit, and mpirun goes on without it.
    "hosts with shrink: one direction of a link is lost": 3,
    # mpirun's daemon never reports back from there.
    "hosts: a host is switched off and on": 51,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_it_ends_as_promised(name: str, hosts: LocalHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds_of_hosts, "TIMEOUT", 12)
    with (library := Library(folder=tmp_path / "whole", limit=180)).held:
        library.kept("hosts", lambda: contextlib.nullcontext(hosts))
        case = Case(kind=KINDS[name], seed=CASES[name], framework="torch", backend="mpi")
        result = campaign.run(case, tmp_path / "case", library)
    assert result.verdict.outcome in ("recovered", "resumed"), (result.verdict.faults, result.printed)

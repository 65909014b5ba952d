"""The proof of a build can fail: it tells a wrong mean from the right one."""

from __future__ import annotations

import sys

import pytest

from hpctrain.worker.comm import selftest
from hpctrain.worker.comm.single import SingleCommunicator
from support import needs


@pytest.fixture
def rank_1(monkeypatch: pytest.MonkeyPatch) -> SingleCommunicator:
    """Rank 1 of 2, whose collectives return what they are given."""
    comm = SingleCommunicator("test")
    monkeypatch.setattr(comm, "rank", 1, raising=False)
    monkeypatch.setattr(comm, "size", 2, raising=False)
    monkeypatch.setattr(selftest, "init", lambda backend: comm)
    monkeypatch.setattr(sys, "argv", ["selftest", "--framework", "torch"])
    return comm


@needs.pytorch
def test_numbers_that_were_not_reduced_fail(rank_1: SingleCommunicator) -> None:
    with pytest.raises(SystemExit, match=r"rank 1: the mean is 2\.0 at 1, it should be 1\.5"):
        selftest.main()

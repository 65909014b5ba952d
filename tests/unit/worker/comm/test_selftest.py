"""The proof of a build can fail: it tells a wrong mean from the right one."""

from __future__ import annotations

import sys

import pytest

from hpctrain.worker.comm import selftest
from hpctrain.worker.comm.single import SingleCommunicator
from support import needs
from support.refusals import refused


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
    with refused("HT-reduction-wrong-result", rank=1, size=2, mean=2.0, place=1, expected=1.5):
        selftest.main()

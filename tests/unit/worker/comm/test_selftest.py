"""The proof of a build can fail: it tells a wrong mean from the right one."""

from __future__ import annotations

import sys

import numpy as np
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


def test_the_mean_passes(rank_1: SingleCommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    mean = np.arange(selftest.NUMBERS, dtype=np.float32) * 1.5
    monkeypatch.setattr(selftest, "_torch", lambda comm, numbers: mean)
    selftest.main()


def test_one_rank_proves_nothing(rank_1: SingleCommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_1, "size", 1)
    with pytest.raises(SystemExit, match="at least 2 ranks"):
        selftest.main()

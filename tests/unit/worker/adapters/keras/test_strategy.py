"""What is refused of tf.distribute, in one process; tests/mpi has the strategies themselves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from support.refusals import refused

pytest.importorskip("tensorflow")

import tensorflow as tf

from hpctrain.worker.adapters.keras import coordinator, strategy
from hpctrain.worker.comm.single import SingleCommunicator


def test_one_process_has_the_strategy_that_changes_nothing() -> None:
    assert strategy(comm=SingleCommunicator("alone")) is tf.distribute.get_strategy()


def test_ranks_of_another_backend_would_train_alone() -> None:
    comm = SimpleNamespace(strategy=None, size=2, backend="mpi")
    with refused("HT-backend-unfit", backend="mpi", size=2):
        strategy(comm=comm)
    with refused("HT-backend-unfit", backend="mpi"):
        coordinator(comm=comm)

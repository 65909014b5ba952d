"""What is refused of tf.distribute and keras.distribution, in one process; tests/mpi has the strategies themselves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from support.refusals import refused

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

from hpctrain.worker.adapters.keras import coordinator, distribute, strategy
from hpctrain.worker.comm.single import SingleCommunicator


def test_one_process_has_the_strategy_that_changes_nothing() -> None:
    assert strategy(comm=SingleCommunicator("alone")) is tf.distribute.get_strategy()


def test_ranks_of_another_backend_would_train_alone() -> None:
    comm = SimpleNamespace(strategy=None, size=2, backend="mpi")
    with refused("HT-backend-no-strategy", backend="mpi", size=2):
        strategy(comm=comm)
    with refused("HT-backend-no-coordinator", backend="mpi"):
        coordinator(comm=comm)


def test_a_distribution_of_keras_is_refused_on_tensorflow() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
    try:
        for action in (strategy, lambda comm: distribute(model, keras.optimizers.SGD(), comm=comm)):
            with refused("HT-keras-distribution-ineffective", kind="DataParallel"):
                action(comm=SingleCommunicator("alone"))
    finally:
        keras.distribution.set_distribution(None)

"""A fit that begins with a later epoch has the orders of its epochs, and one that goes on keeps its own."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

from hpctrain.worker.adapters import keras as adapter  # noqa: E402
from hpctrain.worker.comm.single import SingleCommunicator  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def seed():
    """A shuffle's order is that of its own seed and of the global one, which no earlier test may decide."""
    keras.utils.set_random_seed(1)


X = np.random.default_rng(0).random((20, 3))
Y = X[:, :2] ** 2


def arrays(**settings):
    return adapter.shard((X, Y), batch_size=6, comm=SingleCommunicator("test"), **settings)


def shuffled(**settings):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(20, seed=5).batch(6)
    return adapter.shard(dataset, comm=SingleCommunicator("test"), **settings).prefetch(2)


def trained(fits, data, weights=None, callbacks=()):
    """The weights after some calls of fit; plain SGD has no other state."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    if weights:
        model.set_weights(weights)
    model, optimizer = adapter.distribute(model, keras.optimizers.SGD(0.5), comm=SingleCommunicator("test"))
    model.compile(optimizer, "mse")
    for begin, end in fits:
        model.fit(data, initial_epoch=begin, epochs=end, verbose=0, callbacks=list(callbacks))
    return model.get_weights()


def same(found, expected) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def uncounted(**settings):
    return shuffled(**settings).filter(lambda *parts: True)


@pytest.mark.parametrize("made", [arrays, shuffled, uncounted])
def test_fit_with_an_initial_epoch_continues_the_orders(made, tmp_path):
    whole = trained([(0, 4)], made())
    half = trained([(0, 2)], made())
    assert same(trained([(2, 4)], made(), half), whole)
    assert same(trained([(2, 3), (3, 4)], made(), half), whole)
    # Without a number of its own, each call goes on with the next order, as ever.
    assert same(trained([(0, 1)] * 4, made()), whole)
    assert not same(trained([(0, 2)], made(), half), whole)


@pytest.mark.parametrize("made", [arrays, shuffled])
def test_backup_and_restore_continues_the_orders(made, tmp_path):
    class Stopped(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    whole = trained([(0, 4)], made())
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(KeyboardInterrupt):
        trained([(0, 4)], made(), callbacks=[backup, Stopped()])
    again = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    assert same(trained([(0, 4)], made(), callbacks=[again]), whole)

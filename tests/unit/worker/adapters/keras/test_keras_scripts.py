"""Scripts that train with Keras in other ways than compile and fit alone: in one process, at one place among ranks."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

from hpctrain.worker.adapters import keras as adapter  # noqa: E402
from hpctrain.worker.adapters.keras.sharding import compare_datasets  # noqa: E402
from hpctrain.worker.comm.single import SingleCommunicator  # noqa: E402

X = np.random.default_rng(0).random((10, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


class Place(SingleCommunicator):
    """One place among several ranks, whose exchanges bring what it has itself."""

    def __init__(self, rank: int = 0, size: int = 2) -> None:
        super().__init__("test")
        self.rank, self.size = rank, size


def network() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def distributed(model: keras.Model, comm: SingleCommunicator, **settings) -> keras.Model:
    model, optimizer = adapter.distribute(model, keras.optimizers.SGD(0.1), comm=comm)
    model.compile(optimizer=optimizer, **settings)
    return model


class OwnStep(keras.Model):
    """Trained by its network, without a call of its own; it reduces its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(self.loss(y, self.network(x, training=True)))
        variables = self.network.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class OwnLoss(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def call(self, x):
        return self.network(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean((y - y_pred) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("eagerly", [False, True])
def test_metrics_that_their_first_update_builds_count_own_samples_alone(eagerly):
    """The one batch has a sample for the first of two ranks."""
    for rank in range(2):
        comm = Place(rank)
        model = OwnLoss()
        model(X)
        model = distributed(model, comm, metrics=["mae"], run_eagerly=eagerly)
        expected = float(np.abs(Y[:1] - model(X[:1])).mean())
        model.fit(adapter.shard((X[:1], Y[:1]), batch_size=1, comm=comm), verbose=0)
        assert float(model.get_metrics_result()["mae"]) == pytest.approx(0 if rank else expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "sharded", "reduction"),
    [(1, False, None), (1, True, None), (2, True, None), (2, True, "sum_over_batch_size")],
)
def test_a_model_with_a_step_of_its_own_and_no_call(size, sharded, reduction):
    comm = Place(0, size)
    model = distributed(OwnStep(), comm, loss=keras.losses.MeanSquaredError(reduction=reduction))
    before = model.get_weights()[0]
    data = adapter.shard((X, Y), batch_size=5, comm=comm)
    model.fit(data, verbose=0) if sharded else model.fit(X, Y, verbose=0)
    assert (model.get_weights()[0] != before).all()


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_one_process_builds_and_scales_as_plain_keras_does(sharded):
    comm = SingleCommunicator("test")
    model = distributed(keras.Sequential([keras.layers.Dense(1)]), comm, loss="mse")
    half = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, dtype="mixed_float16")])
    half.dtype_policy = "mixed_float16"
    for each in (model, distributed(half, comm, loss="mse")):
        each.fit(adapter.shard((X, Y), batch_size=5, comm=comm), verbose=0) if sharded else each.fit(X, Y, verbose=0)
        assert all(np.isfinite(weights).all() for weights in each.get_weights())


@pytest.mark.slow
def test_a_distributed_model_does_not_live_on():
    model = distributed(network(), SingleCommunicator("test"), loss="mse")
    model.fit(adapter.shard((X, Y), batch_size=5, comm=SingleCommunicator("test")), verbose=0)
    alive = weakref.ref(model)
    del model
    keras.backend.clear_session()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("rows", [tf.ragged.constant([[1], [2, 3], [4]]), tf.sparse.from_dense(np.eye(3))])
def test_ragged_and_sparse_datasets_are_compared_without_their_rows(rows):
    data = tf.data.Dataset.from_tensor_slices((rows, np.arange(3))).batch(2)
    compare_datasets(SingleCommunicator("alone"), data)

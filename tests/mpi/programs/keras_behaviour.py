"""What the Keras adapter promises beside the numbers, each as a function that asserts; on 3 ranks.

``python keras_behaviour.py BACKEND FOLDER``
"""

from __future__ import annotations

import functools
import re
import sys
import time
from pathlib import Path

import keras
import keras_misuse
import numpy as np
import recipe_runs
import tensorflow as tf
from keras_small import LOSS, network, refused, samples, update

import hpctrain as ht
from hpctrain.worker.comm.base import RanksLostError
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.train.keras_trainer import KerasTrainer


class Largest(keras.metrics.Metric):
    """No sum over samples: what two ranks found cannot be added up."""

    def __init__(self):
        super().__init__(name="largest")
        self.found = self.add_weight(name="found", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.found.assign(tf.maximum(self.found, tf.reduce_max(tf.abs(y_true - y_pred))))

    def result(self):
        return tf.convert_to_tensor(self.found.value)


class MeanOfBatches(Largest):
    """The mean over batches of what only a whole batch gives."""

    def __init__(self):
        super().__init__()
        self.name = "mean_of_batches"
        self.batches = self.add_weight(name="batches", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.found.assign_add(root(y_true, y_pred))
        self.batches.assign_add(1)

    def result(self):
        return self.found / self.batches


class Counting(keras.Model):
    """Counts samples in a step of its own."""

    def train_step(self, data):
        logs = super().train_step(data)
        self.count.update_state(tf.shape(data[0])[0])
        return logs | {"count": self.count.result()}


def counting() -> Counting:
    plain = network()
    model = Counting(plain.inputs, plain.outputs)
    model.count = keras.metrics.Sum(name="count")
    return model


def root(y_true, y_pred):
    return tf.sqrt(tf.reduce_mean(tf.square(y_true - y_pred)))


def metrics_are_those_of_whole_batches() -> None:
    """Nor those that are. Batches of 5, 5 and 1, so that all ranks but one have no sample of the last."""
    x, y, _ = samples(11, 3)
    # The first makes no variable in its first step, which TensorFlow then traces once.
    for make in (
        lambda: [keras.metrics.Precision(name="precision"), keras.metrics.TruePositives(name="positives")],
        lambda: ["accuracy", "mse", keras.metrics.F1Score(threshold=0.5, name="f1")],
        lambda: [root, Largest(), MeanOfBatches(), keras.metrics.AUC(name="auc")],
    ):
        found = []
        for distributed in (True, False):
            keras.utils.set_random_seed(0)
            model, optimizer = counting(), keras.optimizers.SGD(0.05)
            data, seen = tf.data.Dataset.from_tensor_slices((x, y)).batch(5), []
            if distributed:
                model, optimizer = ht.distribute(model, optimizer)
                data = ht.shard(data)
            note = keras.callbacks.LambdaCallback(on_test_end=lambda logs, seen=seen: seen.append(dict(logs)))
            model.compile(optimizer, LOSS, metrics=make())
            history = model.fit(data, epochs=2, validation_data=data, verbose=0, callbacks=[note]).history
            seen.append(model.evaluate(data, verbose=0, callbacks=[note], return_dict=True))
            found.append((history, *seen))
        for ours, plain in zip(*found, strict=True):
            assert set(ours) == set(plain)
            for name, value in plain.items():
                np.testing.assert_allclose(ours[name], value, rtol=1e-5, err_msg=name)


def different_metrics_are_refused() -> None:
    model, optimizer = ht.distribute(network(), keras.optimizers.SGD(0.1))
    model.compile(optimizer, LOSS, metrics=["accuracy"] if RANK else ["accuracy", "mse"])
    fit = functools.partial(model.fit, *samples(8, 0)[:2], verbose=0, callbacks=ht.keras.callbacks())
    refused(fit, "HT-ranks-different-models")


def different_models_are_refused() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2 + (RANK == 1))])
    refused(lambda: ht.distribute(model, keras.optimizers.SGD(0.1)), "HT-ranks-different-models")
    # Nothing else is concerned.
    number = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        square = number * number
    assert tape.gradient(square, number) == 6


def an_update_before_the_broadcast_is_refused() -> None:
    model, optimizer = ht.distribute(keras.Sequential([keras.layers.Dense(1)]), keras.optimizers.SGD(0.1))
    x, y, _ = samples(8, RANK)
    refused(lambda: update(model, optimizer, x, y), "HT-model-not-built")
    for callbacks in ([], ht.keras.callbacks()):
        model, optimizer = ht.distribute(keras.Sequential([keras.layers.Dense(1)]), keras.optimizers.SGD(0.1))
        model.compile(optimizer, LOSS)
        refused(functools.partial(model.fit, x, y, verbose=0, callbacks=callbacks), "HT-model-not-built")


def the_guard_watches_every_loop() -> None:
    """Without the reduction the ranks part at the first step, and each loop stops there."""
    x, y, _ = samples(8, RANK)
    for loop in ("graph", "fit"):
        model, optimizer = ht.distribute(network(), keras.optimizers.SGD(0.1))
        optimizer._reduction.of_tape = lambda variables, gradients, share: gradients
        model.compile(optimizer, LOSS)
        if loop == "fit":
            run = functools.partial(model.fit, x, y, verbose=0)
        else:
            run = functools.partial(tf.function(update), model, optimizer, x, y)
        # A tf.function of the user's own turns errors into others.
        kind = Exception if loop == "graph" else ht.HpctrainError
        message = refused(run, "HT-parameters-differ", kind)
        assert all(each in message for each in ("step 1 ", "only/", COMM.host)), message


def the_guard_sees_one_flipped_bit_later() -> None:
    x, y, _ = samples(8, 0)
    model, optimizer = ht.distribute(network(), keras.optimizers.SGD(0.1), guard_every=4)
    step = tf.function(update)
    step(model, optimizer, x, y)
    if RANK == 1:
        kernel = model.weights[0].numpy()
        kernel.view("uint32")[2] ^= 1
        model.weights[0].assign(kernel)
    step(model, optimizer, x, y)
    step(model, optimizer, x, y)
    message = refused(lambda: step(model, optimizer, x, y), "HT-parameters-differ")
    told = r"step 4\b.*\brank 1\b"
    assert re.search(told, message) and f"({COMM.host})" in message, message


def a_model_saves_as_the_users_own(folder: Path) -> None:
    @keras.saving.register_keras_serializable("mine")
    class Mine(keras.optimizers.Adam):
        pass

    given = Mine(0.01, beta_1=0.8)
    model, optimizer = ht.distribute(network(), given)
    assert optimizer is given and isinstance(optimizer, Mine)
    assert type(optimizer).__qualname__ == Mine.__qualname__ and type(optimizer).__module__ == Mine.__module__
    model.compile(optimizer, LOSS)
    model.fit(*samples(8, 0)[:2], verbose=0, callbacks=ht.keras.callbacks())
    path = folder / f"{RANK}.keras"
    model.save(path)
    loaded = keras.models.load_model(path, safe_mode=True)
    assert type(loaded.optimizer) is Mine and loaded.optimizer.beta_1 == 0.8
    for ours, theirs in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    refused(lambda: ht.distribute(model, optimizer), "HT-optimizer-distributed-twice")


def means_stay_as_they_are() -> None:
    """Tensors that somebody keeps do not change when later ones are reduced, whatever their type and shape."""
    engine = COMM.tensorflow()
    in_graph = tf.function(lambda tensors: engine.allreduce(tensors, "kept"))
    for reduce in (in_graph, lambda tensors: engine.allreduce(tensors, "eager")):
        kept = []
        for step in range(5):
            values = [np.full(shape, 2.0 * RANK + step) for shape in ((300, 70), (), (0, 4), (5,), (3, 2))]
            types = ("float32", "float64", "float32", "float16", "bfloat16")
            kept.append(reduce([tf.cast(value, name) for value, name in zip(values, types, strict=True)]))
        for step, means in enumerate(kept):
            assert [tuple(mean.shape) for mean in means] == [(300, 70), (), (0, 4), (5,), (3, 2)]
            for mean in means:
                np.testing.assert_array_equal(tf.cast(mean, tf.float64), np.full(mean.shape, SIZE - 1.0 + step))


def reductions_of_one_graph_keep_their_order() -> None:
    """Two that do not depend on each other, of which each rank has another one ready first."""
    one, other = COMM.tensorflow(), COMM.tensorflow()

    def late(value: float) -> tf.Tensor:
        return tf.py_function(lambda x: time.sleep(0.2) or x, [tf.constant(value)], tf.float32)

    @tf.function
    def both() -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        first, second = (late(1.0 + RANK) if turn == RANK % 2 else tf.constant(1.0 + RANK) for turn in (0, 1))
        return one.allreduce([first], "first"), other.allreduce([tf.stack([second, 10 * second])], "second")

    (first,), (second,) = both()
    middle = (SIZE + 1) / 2
    assert first.numpy() == middle and second.numpy().tolist() == [middle, 10 * middle]


def a_failed_reduction_changes_nothing_and_raises_its_own_error() -> None:
    x, y, _ = samples(8, 0)
    model, optimizer = ht.distribute(network(), keras.optimizers.Adam(0.1))
    model.compile(optimizer, LOSS)
    model.fit(x, y, verbose=0, callbacks=ht.keras.callbacks())
    step = tf.function(update)
    step(model, optimizer, x, y)
    before = [variable.numpy() for variable in [*model.weights, *optimizer.variables]]
    engine = optimizer._reduction._engine
    works, engine._copies = engine._copies, _fails
    refused(lambda: step(model, optimizer, x, y), "HT-rank-died")
    refused(lambda: model.fit(x, y, verbose=0, callbacks=ht.keras.callbacks()), "HT-rank-died", RanksLostError)
    refused(lambda: update(model, optimizer, x, y), "HT-rank-died", RanksLostError)
    engine._copies = works
    for value, variable in zip(before, [*model.weights, *optimizer.variables], strict=True):
        np.testing.assert_array_equal(value, variable.numpy(), err_msg=variable.path)
    step(model, optimizer, x, y)


def an_overflow_on_one_rank_leaves_the_update_out_on_all() -> None:
    values = {"optimizer": {"name": "sgd", "learning_rate": 0.02}, "batch": {"size": 8}}
    trainer = KerasTrainer(recipe_runs.recipe(**values, precision="fp16").at(SIZE), COMM)
    images = np.random.default_rng(RANK).normal(size=(4, 8, 8, 1)).astype(np.float32)
    weights, scales = [], []
    for factor in (1.0, np.inf if RANK == SIZE - 1 else 1.0, 1.0):
        trainer.step([Samples(images=images, labels=np.arange(4))], 1, factor / 400, 0.02, 1.0)
        weights.append(np.concatenate([each.ravel() for each in trainer.model.get_weights()]))
        scales += [float(value) for name, value in trainer.state().items() if name.endswith("dynamic_scale")]
    first, skipped, last = weights
    np.testing.assert_array_equal(skipped, first)
    assert np.isfinite(last).all() and (last != first).any()
    assert scales == [2**16, 2**15, 2**15], scales
    assert len({each.tobytes() for each in COMM.allgather_object(last)}) == 1
    # In float32 a number that is none is no overflow: all ranks hear of the step, which changes nothing.
    trainer = KerasTrainer(recipe_runs.recipe(**values).at(SIZE), COMM)
    before = trainer.model.get_weights()
    images[0] = np.nan if RANK == SIZE - 1 else images[0]
    trainer.step([Samples(images=images, labels=np.arange(4))], 1, 1 / 400, 0.02, 1.0)
    assert trainer.faulty and all(map(np.array_equal, before, trainer.model.get_weights()))


def _fails(*_: object) -> None:
    time.sleep(0.1)  # long enough for whatever does not wait
    raise RanksLostError("HT-rank-died", "rank 7 died")


def main(folder: Path) -> None:
    means_stay_as_they_are()
    the_guard_sees_one_flipped_bit_later()
    if COMM.backend != "mpi":  # what follows is not the engine's business, or the MPI engine's alone
        return
    metrics_are_those_of_whole_batches()
    different_metrics_are_refused()
    different_models_are_refused()
    an_update_before_the_broadcast_is_refused()
    the_guard_watches_every_loop()
    a_model_saves_as_the_users_own(folder)
    keras_misuse.check(COMM, folder)
    reductions_of_one_graph_keep_their_order()
    a_failed_reduction_changes_nothing_and_raises_its_own_error()
    an_overflow_on_one_rank_leaves_the_update_out_on_all()
    # The last: the ranks have parted.
    keras_misuse.gradients_of_other_variables_are_refused(COMM)


if __name__ == "__main__":
    COMM = ht.init(sys.argv[1])
    RANK, SIZE = COMM.rank, COMM.size
    main(Path(sys.argv[2]))
    print(f"rank {RANK} is through")

"""Scripts for Keras as its guides write them: ``fit``, loops, models that train themselves, losses of whole batches."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops
from keras_runs import adam, dense, fitted, pattern, sgd

# What may be given to ``compile`` and ``fit``.


@pattern
def stopping_early_on_joined_metrics(run):
    stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    plateau = keras.callbacks.ReduceLROnPlateau("val_mae", factor=0.5, patience=0, min_delta=0.2)
    validation = run.data(run.normal(4), run.normal(1))
    settings = {"epochs": 6, "validation_data": validation, "callbacks": [*run.callbacks(), stop, plateau]}
    return fitted(run, dense(), sgd(), "mse", run.normal(4), run.normal(1), metrics=["mae"], fit=settings)


@pattern
def tokens_behind_a_mask(run):
    tokens = run.labels(9, 5)
    tokens[:, 3:] *= run.labels(2, 2)
    inputs = keras.Input((5,), dtype="int32")
    hidden = layers.Embedding(9, 4, mask_zero=True)(inputs)
    model = keras.Model(inputs, layers.Dense(9)(layers.GRU(4, return_sequences=True)(hidden)))
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    return fitted(run, model, adam(), loss, tokens, run.labels(9, 5))


@pattern
def loss_that_is_a_sum(run):
    loss = losses.MeanSquaredError(reduction="sum")
    return fitted(run, dense(), keras.optimizers.SGD(0.005), loss, run.normal(4), run.normal(1))


@pattern
def loss_over_the_sum_of_weights(run):
    loss = losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return fitted(run, dense(), adam(), loss, run.normal(4), run.normal(1), run.random.random(run.samples))


class Activity(layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * ops.mean(ops.square(inputs)))
        return inputs


@pattern
def added_losses_and_regularisers(run):
    hidden = layers.Dense(5, kernel_regularizer="l2", bias_regularizer="l1", activity_regularizer="l2")
    return fitted(run, dense(1, Activity(), hidden), adam(), "mse", run.normal(4), run.normal(1))


@pattern
def synchronized_batch_norm(run):
    model = dense(1, layers.BatchNormalization(synchronized=True, momentum=0.5))
    return fitted(run, model, adam(), "mse", run.normal(4), run.normal(1))


# Loops without ``fit``, and data that ``ht.shard`` did not make.


@pattern
def loop_over_a_list(run):
    model, optimizer = run.distribute(dense(), adam())
    optimizer.build(model.trainable_variables)
    loss = losses.MeanSquaredError()
    for x, y, *rest in list(run.data(run.normal(4), run.normal(1)))[::-1]:
        weight, share = rest or (None, 1.0)
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True), sample_weight=weight) * share
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return model.get_weights()


@pattern
def loop_clipped_by_hand(run):
    """Each in another way: the rows of an embedding by their norm, the others by values and by all norms together."""
    parts = [layers.Embedding(7, 4), layers.GlobalAveragePooling1D(), layers.Dense(3), layers.Dense(1)]
    model, optimizer = run.distribute(keras.Sequential([keras.Input((5,), dtype="int32"), *parts]), adam())
    optimizer.build(model.trainable_variables)

    @tf.function(reduce_retracing=True)
    def step(x, y, share):
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(tf.square(y - model(x, training=True))) * share
        rows, kernel, bias, *last = tape.gradient(value, model.trainable_variables)
        together, norm = tf.clip_by_global_norm([rows, *last], 0.1)
        parts = tf.clip_by_norm(rows, 0.02), tf.clip_by_value(kernel, -0.02, 0.02), tf.clip_by_norm(bias, 0.02)
        optimizer.apply_gradients(zip((*parts, *together[1:]), model.trainable_variables, strict=True))
        return norm

    norms = []
    for x, y, *rest in run.data(run.labels(7, 5), run.normal(1)):
        norms.append(step(x, y, tf.cast(rest[-1], tf.float64) if rest else tf.constant(1.0, tf.float64)))
    return norms, model.get_weights()


def own_batches(run, *arrays):
    """Whole batches on one process; on each rank as many rows of its own."""
    rank, size = (run.comm.rank, run.comm.size) if run.comm else (0, 1)
    rows = run.batch // 6 * 6
    own = slice(rank * rows // size, (rank + 1) * rows // size)
    for start in range(0, run.samples - run.batch + 1, run.batch):
        yield tuple(array[start : start + run.batch][own] for array in arrays)


@pattern
def a_generator_on_each_rank(run):
    model, optimizer = run.distribute(dense(), adam())
    model.compile(optimizer, "mse")
    batches = (batch for batch in itertools.cycle(list(own_batches(run, run.normal(4), run.normal(1)))))
    return run.fit(model, batches, steps_per_epoch=3), model.get_weights()


# Models that train themselves, with losses that are divided by tokens.


WORDS, LENGTH = 7, 5


def _mean(run, total, count):
    return run.ht.mean_loss(total, count) if run.distributed else total / count


def _network() -> list:
    return [keras.Input((LENGTH,)), layers.Embedding(WORDS, 6), layers.Dense(6, "tanh"), layers.Dense(WORDS)]


def _sentences(run):
    """Sorted by length: the ranks' parts hold very different numbers of tokens."""
    x = run.labels(WORDS, LENGTH)
    lengths = np.arange(run.samples)[:, None] * LENGTH // run.samples + 1
    return x, np.where(np.arange(LENGTH) < lengths, 1 + (x + 1) % (WORDS - 1), 0)


def _tokens(y, y_pred):
    """The sum over tokens, and their number."""
    each = losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
    mask = tf.cast(y != 0, each.dtype)
    return tf.reduce_sum(each * mask), tf.reduce_sum(mask)


class OwnStep(keras.Sequential):
    """Its loss is what a function makes of targets and predictions."""

    def __init__(self, parts, loss_of) -> None:
        super().__init__(parts)
        self.loss_of = loss_of
        self.tracker = keras.metrics.Mean(name="own_loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"own_loss": self.tracker.result()}


def _stepped(run, loss_of):
    model, optimizer = run.distribute(OwnStep(_network(), loss_of), sgd())
    model.compile(optimizer)
    optimizer.build(model.trainable_variables)
    return run.fit(model, run.data(*_sentences(run))), model.get_weights()


class TwoOptimizers(OwnStep):
    """The layers in turn: each optimizer has some of the variables."""

    def train_step(self, data):
        x, y = data[:2]
        for optimizer, part in zip(self.optimizers, (self.layers[:2], self.layers[2:]), strict=True):
            variables = [variable for layer in part for variable in layer.trainable_variables]
            with tf.GradientTape() as tape:
                loss = self.loss_of(y, self(x, training=True))
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"last_loss": loss}


@pattern
def two_optimizers_of_one_model(run):
    model = TwoOptimizers(_network(), losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizers = [run.distribute(model, make())[1] for make in (sgd, adam)]
    model.compile()
    run.fit(model, run.data(*_sentences(run)))
    return model.get_weights()


@pattern
def train_step_divided_by_tokens(run):
    return _stepped(run, lambda y, y_pred: _mean(run, *_tokens(y, y_pred)))


# Losses, metrics and gradients that are no sums over samples.


def _whole(run, *values):
    return run.ht.keras.whole(*values) if run.distributed else values


class Punished(keras.Sequential):
    """Its loss holds the size of its own gradients, which a second tape differentiates."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
            first = inner.gradient(loss, self.trainable_variables)
            total = loss + 0.1 * tf.linalg.global_norm(first) + tf.reduce_mean(self(x)) * tf.reduce_sum(first[0])
        gradients = outer.gradient(total, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "size": tf.linalg.global_norm(first)}


@pattern
def gradients_of_gradients(run):
    model = Punished([keras.Input((4,)), layers.Dense(6, activation="tanh"), layers.Dense(1)])
    return fitted(run, model, sgd(), None, run.normal(4), run.normal(1))


class Weighted(keras.Sequential):
    """Divides by the weights of the batch, and takes statistics, penalties and the input into its loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        weight = ops.take(ops.array([0.2, 1.0, 3.0], "float64"), y)
        weight = weight if sample_weight is None else weight * ops.cast(ops.reshape(sample_weight, (-1,)), "float64")
        each = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        loss = ops.sum(weight * each) / ops.sum(weight)
        # The variance of a single sample is 0.
        spread = ops.sqrt(ops.mean(ops.var(y_pred, axis=0)) + 0.1)
        self.seen.update_state(y, y_pred)
        return loss + 0.1 * spread + 0.01 * ops.sum(self.layers[-1].kernel ** 2) + ops.std(x) * ops.mean(self(x)) ** 2


def weighted() -> Weighted:
    model = Weighted(
        [keras.Input((4,)), layers.Dense(6, activation="tanh", activity_regularizer="l2"), layers.Dense(3)]
    )
    model.seen = keras.metrics.SparseCategoricalAccuracy(name="seen")
    return model


@pattern
def class_weights_in_a_compute_loss(run):
    return fitted(run, weighted(), adam(), None, run.normal(4), run.labels(3))


def standardised(y, y_pred):
    """A value for each sample, to which the whole batch adds."""
    centred = y_pred - tf.reduce_mean(y_pred, 0)
    return tf.reduce_mean(tf.square(centred / tf.sqrt(tf.reduce_mean(centred**2, 0) + 0.1) - y), axis=-1)


def root(y, y_pred):
    return tf.sqrt(tf.reduce_mean(tf.square(y - y_pred)))


class Correlated(keras.losses.Loss):
    def call(self, y, y_pred):
        y, y_pred = y - tf.reduce_mean(y), y_pred - tf.reduce_mean(y_pred)
        return 1 - tf.reduce_sum(y * y_pred) / tf.sqrt(tf.reduce_sum(y**2) * tf.reduce_sum(y_pred**2) + 1e-3)


class Rooted(keras.losses.Loss):
    """Reduces in a way of its own."""

    def __call__(self, y, y_pred, sample_weight=None):
        return tf.sqrt(super().__call__(y, y_pred, sample_weight))

    def call(self, y, y_pred):
        return tf.reduce_mean(tf.square(y - y_pred), axis=-1)


@pattern
def functions_of_whole_batches_of_several_outputs(run):
    inputs = keras.Input((4,))
    hidden = layers.Dense(6, activation="tanh")(inputs)
    outputs = {name: layers.Dense(2, name=name)(hidden) for name in ("a", "b", "c", "d")}
    losses = {"a": standardised, "b": Correlated(), "c": "mse", "d": Rooted()}
    weights = {"a": 1.0, "b": 0.5, "c": 2.0, "d": 3.0}
    model, optimizer = run.distribute(keras.Model(inputs, outputs), adam())
    metrics = {"a": [standardised, root], "b": ["mae", root], "c": [standardised]}
    model.compile(optimizer, losses, loss_weights=weights, metrics=metrics)
    optimizer.build(model.trainable_variables)
    x, y = run.normal(4), {name: run.normal(2) for name in outputs}
    data = run.data(x, y)
    return run.fit(model, data, validation_data=data), model.evaluate(data, verbose=0), model.get_weights()


class Whole(keras.Sequential):
    """Computes its loss from tensors by itself: no mean, a division by a constant, and samples against all others."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            own = self(x, training=True)
            target, found = _whole(self.run, y, {"out": own})
            error = tf.square(target - found["out"])
            loss = tf.sqrt(tf.reduce_mean(error)) + tf.reduce_sum(error) / 12.0 + tf.reduce_max(error)
            likeness = tf.nn.softmax(tf.matmul(own, found["out"], transpose_b=True))
            loss += tf.reduce_mean(tf.square(tf.matmul(likeness, target) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.3)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": loss, "norm": norm, "other_name": self.tracker.result()}


@pattern
def train_step_of_whole_tensors(run):
    model = Whole([keras.Input((4,)), layers.Dense(6, activation="tanh"), layers.Dense(2)])
    model.run, model.tracker = run, keras.metrics.Mean(name="tracker")
    return fitted(run, model, adam(), None, run.normal(4), run.normal(2))

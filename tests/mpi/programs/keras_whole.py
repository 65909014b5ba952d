"""Losses, metrics and gradients that are no sums over samples, and what is printed of them."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers, ops
from keras_runs import adam, fitted, pattern, sgd


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
    found = []
    for settings in ({}, {"run_eagerly": True}):
        keras.utils.set_random_seed(2)
        model = Whole([keras.Input((4,)), layers.Dense(6, activation="tanh"), layers.Dense(2)])
        model.run, model.tracker = run, keras.metrics.Mean(name="tracker")
        found.append(fitted(run, model, adam(), None, run.normal(4), run.normal(2), **settings))
    return found


class Printing(keras.Sequential):
    """Returns what a step computes, under names that its metrics do not have."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = tf.reduce_mean(tf.square(y - y_pred))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.mean.update_state(loss)
        self.error.update_state(y, y_pred)
        return {"raw": loss, "average": self.mean.result(), "mae": self.error.result()}


@pattern
def numbers_that_a_step_returns(run):
    model = Printing([keras.Input((4,)), layers.Dense(6, activation="tanh"), layers.Dense(1)])
    model.mean, model.error = keras.metrics.Mean(name="m"), keras.metrics.MeanAbsoluteError(name="e")
    seen = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(sorted(logs.items())))
    found = fitted(run, model, adam(), None, run.normal(4), run.normal(1), fit={"callbacks": [note]})
    return found, [[value for _, value in logs] for logs in seen]

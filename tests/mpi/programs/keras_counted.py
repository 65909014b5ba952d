"""Losses that are divided by tokens or weights, in steps and loops of a script's own."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses
from keras_runs import adam, pattern, sgd

WORDS, LENGTH = 7, 5


def _mean(run, total, count, **share):
    return run.ht.mean_loss(total, count, **share) if run.distributed else total / count


def _sum(run, total, **share):
    return run.ht.sum_loss(total, **share) if run.distributed else total


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


@pattern
def train_step_divided_by_tokens(run):
    return _stepped(run, lambda y, y_pred: _mean(run, *_tokens(y, y_pred)))


@pattern
def train_step_with_a_sum_and_a_mean(run):
    def loss(y, y_pred):
        return 0.01 * _sum(run, _tokens(y, y_pred)[0]) + tf.reduce_mean(y_pred**2)

    return _stepped(run, loss)


@pattern
def train_step_with_an_ignored_class(run):
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    return _stepped(run, lambda y, y_pred: loss(y, y_pred))


@pattern
def train_step_with_a_summed_loss(run):
    loss, other = losses.MeanSquaredError(reduction="sum"), losses.MeanAbsoluteError()
    return _stepped(run, lambda y, y_pred: 0.01 * loss(y, y_pred[..., 0]) + other(y, y_pred[..., 1]))


@pattern
def train_step_with_a_mean_of_weights(run):
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    return _stepped(run, lambda y, y_pred: loss(y, y_pred, tf.cast(y, "float64")))


class OwnCounted(keras.Sequential):
    run = None

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return _mean(self.run, *_tokens(y, y_pred))


@pattern
def compute_loss_divided_by_tokens(run):
    model = OwnCounted(_network())
    OwnCounted.run = run
    model, optimizer = run.distribute(model, adam())
    model.compile(optimizer)
    optimizer.build(model.trainable_variables)
    return run.fit(model, run.data(*_sentences(run))), model.get_weights()


def _looped(run, graph):
    model, optimizer = run.distribute(keras.Sequential(_network()), adam())
    optimizer.build(model.trainable_variables)

    def step(x, y, share):
        with tf.GradientTape() as tape:
            total, count = _tokens(y, model(x, training=True))
            loss = _mean(run, total, count, **({"share": share} if run.distributed else {}))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    step = tf.function(step, reduce_retracing=True) if graph else step
    values = [float(step(x, y, rest[-1] if rest else None)) for x, y, *rest in run.data(*_sentences(run))]
    return values, model.get_weights()


@pattern
def loop_divided_by_tokens(run):
    return _looped(run, graph=True)


@pattern
def eager_loop_divided_by_tokens(run):
    return _looped(run, graph=False)

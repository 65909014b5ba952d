"""Models that train themselves, as the guides of keras.io write them, some with losses that are divided by tokens."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses
from keras_runs import adam, fitted, pattern, sgd


class KerasIo(keras.Sequential):
    """https://keras.io/guides/custom_train_step_in_tensorflow: the first example."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


@pattern
def train_step_of_the_guide(run):
    model = KerasIo([keras.Input((4,)), layers.Dense(6, activation="tanh"), layers.Dense(1)])
    return fitted(run, model, adam(), "mse", run.normal(4), run.normal(1), metrics=["mae"])


class Gan(keras.Model):
    """https://keras.io/guides/custom_train_step_in_tensorflow: the GAN, without random numbers of a rank's own."""

    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential(
            [keras.Input((4,)), layers.Dense(5, activation="tanh"), layers.Dense(1)], name="discriminator"
        )
        self.generator = keras.Sequential(
            [keras.Input((3,)), layers.Dense(5, activation="tanh"), layers.Dense(4)], name="generator"
        )
        self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    def train_step(self, real_images):
        if isinstance(real_images, tuple):
            real_images = real_images[0]
        batch_size = tf.shape(real_images)[0]
        latent = real_images[:, :3]
        combined = tf.concat([self.generator(latent), real_images], axis=0)
        labels = tf.concat([tf.ones((batch_size, 1)), tf.zeros((batch_size, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply(grads, self.discriminator.trainable_weights)
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(latent))
            g_loss = self.loss_fn(tf.zeros((batch_size, 1)), predictions)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply(grads, self.generator.trainable_weights)
        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {"d_loss": self.d_loss_tracker.result(), "g_loss": self.g_loss_tracker.result()}

    @property
    def metrics(self):
        return [self.d_loss_tracker, self.g_loss_tracker]


@pattern
def gan_of_the_guide(run):
    gan = Gan()
    gan, d_optimizer = run.distribute(gan, adam())
    gan, g_optimizer = run.distribute(gan, adam())
    gan.compile(d_optimizer, g_optimizer, losses.BinaryCrossentropy(from_logits=True))
    history = run.fit(gan, run.data(run.normal(4)))
    return history, gan.get_weights()


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


@pattern
def train_step_divided_by_tokens(run):
    return _stepped(run, lambda y, y_pred: _mean(run, *_tokens(y, y_pred)))

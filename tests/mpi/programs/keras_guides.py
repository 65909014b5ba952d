"""Models that train themselves, as the guides and examples of keras.io write them."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers, losses, ops
from keras_runs import adam, dense, fitted, pattern, sgd


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


class LowLevel(keras.Model):
    """The same guide, going lower-level."""

    def __init__(self):
        super().__init__()
        self.inner = dense()
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = losses.MeanSquaredError()

    def call(self, inputs, training=None):
        return self.inner(inputs, training=training)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]


@pattern
def train_step_lower_level(run):
    model, optimizer = run.distribute(LowLevel(), adam())
    model.compile(optimizer=optimizer)
    history = run.fit(model, run.data(run.normal(4), run.normal(1)))
    return history, model.get_weights()


class Weighted(keras.Sequential):
    """The same guide, supporting sample_weight and class_weight."""

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {m.name: m.result() for m in self.metrics}


@pattern
def train_step_with_sample_weights(run):
    model = Weighted([keras.Input((4,)), layers.Dense(6, activation="tanh"), layers.Dense(1)])
    data = run.normal(4), run.normal(1), run.random.random(run.samples)
    return fitted(run, model, adam(), "mse", *data, weighted_metrics=["mae"])


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y_pred - y)) + 0.01 * sum(ops.sum(w**2) for w in self.trainable_variables)


@pattern
def compute_loss_of_ones_own(run):
    model = OwnLoss([keras.Input((4,)), layers.Dense(6, activation="tanh"), layers.Dense(1)])
    return fitted(run, model, adam(), None, run.normal(4), run.normal(1))


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


class Vae(keras.Model):
    """https://keras.io/examples/generative/vae, whose noise comes with the data."""

    def __init__(self):
        super().__init__()
        inputs = keras.Input((4,))
        hidden = layers.Dense(5, activation="tanh")(inputs)
        self.encoder = keras.Model(inputs, [layers.Dense(2)(hidden), layers.Dense(2)(hidden)])
        self.decoder = keras.Sequential([keras.Input((2,)), layers.Dense(3)])
        self.trackers = [keras.metrics.Mean(name=name) for name in ("loss", "reconstruction_loss", "kl_loss")]

    @property
    def metrics(self):
        return self.trackers

    def train_step(self, data):
        noise, data = data[:, 3:], data
        with tf.GradientTape() as tape:
            z_mean, z_log_var = self.encoder(data)
            reconstruction = self.decoder(z_mean + ops.exp(0.5 * z_log_var) * noise)
            reconstruction_loss = ops.mean(ops.sum((data[:, :3] - reconstruction) ** 2, axis=1))
            kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        grads = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        for tracker, value in zip(self.trackers, (total_loss, reconstruction_loss, kl_loss), strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


@pattern
def vae_of_the_guide(run):
    vae, optimizer = run.distribute(Vae(), adam())
    vae.compile(optimizer=optimizer)
    images = run.normal(4)
    data = run.ht.shard(images, batch_size=run.batch, shuffle=False) if run.distributed else run.data(images)
    history = run.fit(vae, data)
    return history, vae.get_weights()


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = layers.Dense(6, activation="tanh")
        self.last = layers.Dense(1)

    def call(self, x):
        return self.last(self.first(x))


@pattern
def subclassed_and_built_later(run):
    keras.utils.set_random_seed(4)
    model, optimizer = run.distribute(Subclassed(), adam())
    model.compile(optimizer, "mse")
    model.build((None, 4))
    return run.fit(model, run.data(run.normal(4), run.normal(1))), model.get_weights()


@pattern
def two_phases_of_transfer(run):
    base = keras.Sequential([keras.Input((4,)), layers.Dense(6, activation="tanh"), layers.LayerNormalization()])
    base.trainable = False
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(base(inputs, training=False)))
    data = run.data(run.normal(4), run.normal(1))
    history = []
    for trainable, optimizer in ((False, sgd()), (True, adam())):
        base.trainable = trainable
        model, optimizer = run.distribute(model, optimizer)
        model.compile(optimizer, "mse")
        history.append(run.fit(model, data))
    return history, model.get_weights()

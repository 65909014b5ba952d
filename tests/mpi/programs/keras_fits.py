"""What may be given to ``compile`` and ``fit``."""

from __future__ import annotations

import keras
from keras import layers, losses, ops
from keras_runs import adam, dense, fitted, pattern, sgd


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

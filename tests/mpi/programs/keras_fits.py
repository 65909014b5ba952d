"""What may be given to ``compile`` and ``fit``."""

from __future__ import annotations

import keras
from keras import layers, losses, ops
from keras_runs import adam, dense, fitted, pattern, sgd


@pattern
def several_steps_an_execution(run):
    return fitted(run, dense(), sgd(), "mse", run.normal(4), run.normal(1), steps_per_execution=2)


def two_headed() -> keras.Model:
    inputs = keras.Input((4,))
    hidden = layers.Dense(5, activation="tanh")(inputs)
    heads = [layers.Dense(1, name="price")(hidden), layers.Dense(3, activation="softmax", name="kind")(hidden)]
    return keras.Model(inputs, heads)


@pattern
def two_outputs_with_loss_weights(run):
    data = (run.normal(4), {"price": run.normal(1), "kind": run.labels(3)})
    loss = {"price": "mse", "kind": "sparse_categorical_crossentropy"}
    settings = {"loss_weights": {"price": 2.0, "kind": 0.2}, "metrics": {"kind": ["accuracy"]}}
    return fitted(run, two_headed(), adam(), loss, *data, **settings)


@pattern
def accumulation_by_the_optimizer(run):
    optimizer = adam(gradient_accumulation_steps=3, global_clipnorm=0.5)
    return fitted(run, dense(), optimizer, "mse", run.normal(4), run.normal(1), fit={"epochs": 3})


@pattern
def stopping_early_on_joined_metrics(run):
    stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    plateau = keras.callbacks.ReduceLROnPlateau("val_mae", factor=0.5, patience=0, min_delta=0.2)
    validation = run.data(run.normal(4), run.normal(1))
    settings = {"epochs": 6, "validation_data": validation, "callbacks": [*run.callbacks(), stop, plateau]}
    return fitted(run, dense(), sgd(), "mse", run.normal(4), run.normal(1), metrics=["mae"], fit=settings)


class Positives(keras.metrics.Metric):
    def __init__(self, name):
        super().__init__(name=name)
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(ops.cast(ops.sum(y_pred > 0), self.dtype))

    def result(self):
        return self.count


def mean_error(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred))


def root_error(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


class LargestError(Positives):
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign(ops.maximum(self.count, ops.max(ops.abs(y_true - y_pred))))


@pattern
def metrics_of_ones_own(run):
    data = run.normal(4), run.normal(1)
    metrics = [Positives("positives"), LargestError("largest"), mean_error, root_error]
    return fitted(run, dense(), adam(), "mse", *data, metrics=metrics)


@pattern
def repeated_with_steps_an_epoch(run):
    model, optimizer = run.distribute(dense(), adam())
    model.compile(optimizer, "mse")
    data = run.data(run.normal(4), run.normal(1)).repeat()
    return run.fit(model, data, steps_per_epoch=5), model.get_weights()


@pattern
def class_weights(run):
    model = dense(3, layers.Activation("relu"))
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    settings = {"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}}
    return fitted(run, model, adam(), loss, run.normal(4), run.labels(3), weighted_metrics=["accuracy"], fit=settings)


@pattern
def tokens_behind_a_mask(run):
    tokens = run.labels(9, 5)
    tokens[:, 3:] *= run.labels(2, 2)
    inputs = keras.Input((5,), dtype="int32")
    hidden = layers.Embedding(9, 4, mask_zero=True)(inputs)
    model = keras.Model(inputs, layers.Dense(9)(layers.GRU(4, return_sequences=True)(hidden)))
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    return fitted(run, model, adam(), loss, tokens, run.labels(9, 5))


def root_loss(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


@pattern
def function_that_is_no_mean(run):
    return fitted(run, dense(), sgd(), root_loss, run.normal(4), run.normal(1), metrics=["mae"])


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


def words(run, optimizer, **settings):
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(7, 4),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ]
    )
    return fitted(run, model, optimizer, "mse", run.labels(7, 5), run.normal(1), **settings)


@pattern
def embedding_with_adagrad_clipped(run):
    return words(run, keras.optimizers.Adagrad(0.1, global_clipnorm=0.1))


@pattern
def evaluation_of_sharded_data(run):
    model, optimizer = run.distribute(dense(), adam())
    model.compile(optimizer, "mse", metrics=["mae"])
    data = run.data(run.normal(4), run.normal(1))
    return model.evaluate(data, verbose=0), model.evaluate(data, verbose=0, return_dict=True)

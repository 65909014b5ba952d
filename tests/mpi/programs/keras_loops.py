"""Loops without ``fit``, and data that ``ht.shard`` did not make."""

from __future__ import annotations

import itertools

import keras
import tensorflow as tf
from keras import layers, losses
from keras_runs import adam, dense, pattern


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


@pattern
def the_same_arrays_on_every_rank(run):
    model, optimizer = run.distribute(dense(), adam())
    model.compile(optimizer, "mse")
    data = {"y": run.normal(1), "shuffle": False, "batch_size": run.batch, "validation_split": 0.2}
    return run.fit(model, run.normal(4), **data), model.get_weights()

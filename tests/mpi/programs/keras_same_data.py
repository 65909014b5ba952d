"""What ranks give ``ht.shard`` in Keras, and what their layers draw. ``python keras_same_data.py BACKEND OUT``.

Writes OUT-RANK.json: for each situation of :data:`ALIKE` the largest difference of the trained weights from those of
one process, for each of :data:`DIFFER` the refusal, and for each of :data:`STREAMS` what the ranks' layers drew.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from situations import Named, run

import hpctrain as ht

keras.config.set_floatx("float64")
ALIKE = alike = Named()
DIFFER = differ = Named()
STREAMS = stream = Named()
BATCH, EPOCHS = 6, 2
Dataset = tf.data.Dataset


def numbers(samples=16, seed=0):
    draw = np.random.default_rng(seed)
    return draw.random((samples, 4)), draw.integers(0, 3, samples)


def slices(*arrays):
    return Dataset.from_tensor_slices(arrays or numbers())


def network():
    keras.utils.set_random_seed(5)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def loop(model, optimizer, data):
    for _ in range(EPOCHS):
        for x, y, *rest in data:
            with tf.GradientTape() as tape:
                value = LOSS(y, model(x)) * (rest[-1] if rest else 1)
            optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
    return model.get_weights()


# Data that are alike.


@alike
def a_seeded_shuffle(comm):
    alone, data = (slices().shuffle(16, seed=3).batch(BATCH).prefetch(2) for _ in range(2))
    expected = loop(network(), keras.optimizers.SGD(0.1), alone)
    trained = loop(*ht.distribute(network(), keras.optimizers.SGD(0.1)), ht.shard(data))
    return max(float(np.abs(one - other).max()) for one, other in zip(expected, trained, strict=True))


@alike
def a_look_of_rank_0_at_the_first_batch(comm):
    data = ht.shard(slices().batch(BATCH))
    if comm.rank == 0:
        next(iter(data))
    loop(*ht.distribute(network(), keras.optimizers.SGD(0.1)), data)
    return 0.0


# Data that differ.


@differ
def lengths_of_arrays(comm):
    ht.shard(numbers(16 - 3 * (comm.rank == 1)), batch_size=BATCH)


@differ
def an_unseeded_split_as_slices(comm):
    chosen = np.random.default_rng().permutation(16)[:12]
    ht.shard(slices(*(each[chosen] for each in numbers())).batch(BATCH))


@differ
def an_unseeded_shuffle(comm):
    tf.keras.backend.clear_session()
    tf.random.set_seed(None)
    ht.shard(slices().shuffle(16).batch(BATCH))


@differ
def shuffles_that_are_seeded_apart(comm):
    ht.shard(slices().shuffle(16, seed=comm.rank).batch(BATCH))


@differ
def ranks_that_are_seeded_apart(comm):
    keras.utils.set_random_seed(comm.rank)
    ht.shard(slices().shuffle(16).batch(BATCH))


@differ
def a_shard_of_each_rank(comm):
    ht.shard(slices().shard(comm.size, comm.rank).batch(BATCH))


@differ
def files_in_the_order_of_the_directory(comm):
    names = [f"/data/{i}.png" for i in range(16)]
    ht.shard(slices(names[::-1] if comm.rank else names).batch(BATCH))


# What layers draw.


def masks(comm, model):
    return comm.allgather_object(np.asarray(model.layers[0](np.ones((1, 64)), training=True))[0].tolist())


@stream
def masks_of_one_seed(comm):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    before = masks(comm, model)
    ht.distribute(model, keras.optimizers.SGD(0.1))
    return {"equal": before, "apart": masks(comm, model)}


if __name__ == "__main__":
    run(ALIKE | DIFFER | STREAMS, lambda comm: keras.utils.set_random_seed(1))

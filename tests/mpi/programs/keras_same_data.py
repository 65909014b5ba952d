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


def fitted(data, train):
    model, optimizer = ht.distribute(network(), keras.optimizers.SGD(0.1))
    sharded = ht.shard(data) if isinstance(data, Dataset) else ht.shard(data, batch_size=BATCH, shuffle=False)
    return train(model, optimizer, sharded)


def fit(model, optimizer, data):
    model.compile(optimizer, LOSS)
    model.fit(data, epochs=EPOCHS, verbose=0)
    return model.get_weights()


def loop(model, optimizer, data):
    for _ in range(EPOCHS):
        for x, y, *rest in data:
            with tf.GradientTape() as tape:
                value = LOSS(y, model(x)) * (rest[-1] if rest else 1)
            optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
    return model.get_weights()


def trained(make, given=None, train=loop) -> float:
    """The difference of the weights that the ranks train from those of one process; ``make`` gives the dataset."""
    alone = train(network(), keras.optimizers.SGD(0.1), make())
    pairs = zip(alone, fitted(given or make(), train), strict=True)
    return max(float(np.abs(one - other).max()) for one, other in pairs)


# Data that are alike.


@alike
def arrays(comm):
    return trained(lambda: slices().batch(BATCH), numbers())


@alike
def a_seeded_shuffle(comm):
    return trained(lambda: slices().shuffle(16, seed=3).batch(BATCH).prefetch(2), train=fit)


@alike
def a_shuffle_under_one_seed(comm):
    def make():
        keras.utils.set_random_seed(1)
        return slices().shuffle(16).batch(BATCH)

    return trained(make)


@alike
def a_generator_that_counts_its_passes(comm):
    def make():
        passes = []

        def generate():
            passes.append(1)
            order = np.random.default_rng(len(passes)).permutation(16)
            x, y = numbers()
            yield from ((x[i], y[i]) for i in order)

        signature = tf.TensorSpec((4,), tf.float64), tf.TensorSpec((), tf.int64)
        return Dataset.from_generator(generate, output_signature=signature).batch(BATCH)

    return trained(make)


@alike
def a_generator_that_gives_everything_once(comm):
    def make():
        once = iter([*zip(*numbers(), strict=True)] * 2)
        signature = tf.TensorSpec((4,), tf.float64), tf.TensorSpec((), tf.int64)
        return Dataset.from_generator(lambda: (next(once) for _ in range(16)), output_signature=signature).batch(BATCH)

    return trained(make)


@alike
def dictionaries_and_texts(comm):
    x, y = numbers()
    data = Dataset.from_tensor_slices(({"x": x, "path": [f"/tmp/{i}.png" for i in range(16)]}, y)).batch(BATCH)
    return float(sum(len(batch[0]["path"]) for batch in ht.shard(data)) < 4)


@alike
def two_datasets_joined(comm):
    x, y = numbers()
    return trained(lambda: Dataset.zip(slices(x).map(lambda x: x), slices(y).map(lambda y: y)).batch(BATCH))


@alike
def augmentation_that_nobody_seeded(comm):
    tf.random.set_seed(comm.rank)
    data = slices().map(lambda x, y: (x + tf.random.uniform((4,), dtype=tf.float64), y)).batch(BATCH)
    fitted(data, loop)
    return 0.0


@alike
def augmentation_by_numpy_that_nobody_seeded(comm):
    coins = np.random.default_rng()

    def change(x, y):
        return tf.ensure_shape(tf.numpy_function(lambda x: x + coins.random(4), [x], tf.float64), (4,)), y

    fitted(slices().map(change).batch(BATCH), loop)
    return 0.0


@alike
def a_look_of_rank_0_at_the_first_batch(comm):
    model, optimizer = ht.distribute(network(), keras.optimizers.SGD(0.1))
    data = ht.shard(slices().batch(BATCH))
    if comm.rank == 0:
        next(iter(data))
    loop(model, optimizer, data)
    return 0.0


@alike
def a_tape_in_a_graph(comm):
    model, optimizer = ht.distribute(network(), keras.optimizers.SGD(0.1))

    @tf.function
    def step(x, y, share):
        with tf.GradientTape() as tape:
            value = LOSS(y, model(x)) * share
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

    for _ in range(EPOCHS):
        for x, y, _, share in ht.shard(slices().batch(BATCH)):
            step(x, y, share)
    alone = loop(network(), keras.optimizers.SGD(0.1), slices().batch(BATCH))
    return max(float(np.abs(one - other).max()) for one, other in zip(alone, model.get_weights(), strict=True))


# Data that differ.


@differ
def lengths_of_arrays(comm):
    ht.shard(numbers(16 - 3 * (comm.rank == 1)), batch_size=BATCH)


@differ
def seeds_of_arrays(comm):
    ht.shard(numbers(), batch_size=BATCH, seed=comm.rank)


@differ
def batch_sizes_of_arrays(comm):
    ht.shard(numbers(), batch_size=BATCH - (comm.rank == 1))


@differ
def an_unseeded_split(comm):
    chosen = np.random.default_rng().permutation(16)[:12]
    ht.shard(tuple(each[chosen] for each in numbers()), batch_size=BATCH)


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
def numbers_of_batches(comm):
    ht.shard(slices().batch(BATCH).take(2 if comm.rank == 1 else 3))


@differ
def steps_that_differ(comm):
    data = slices()
    ht.shard((data if comm.rank == 0 else data.shuffle(16, seed=0)).batch(BATCH))


@differ
def files_in_the_order_of_the_directory(comm):
    names = [f"/data/{i}.png" for i in range(16)]
    ht.shard(slices(names[::-1] if comm.rank else names).batch(BATCH))


# What layers draw.


def dropping(seed=None):
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dropout(0.5, seed=seed),
            keras.layers.GaussianNoise(0.1),
            keras.layers.Dense(2),
        ]
    )


def masks(comm, model):
    return comm.allgather_object(np.asarray(model.layers[0](np.ones((1, 64)), training=True))[0].tolist())


@stream
def masks_of_one_seed(comm):
    keras.utils.set_random_seed(0)
    model = dropping()
    before = masks(comm, model)
    ht.distribute(model, keras.optimizers.SGD(0.1))
    return {"equal": before, "apart": masks(comm, model)}


@stream
def masks_of_a_seed_of_the_layers_own(comm):
    keras.utils.set_random_seed(0)
    model, alone = dropping(3), dropping(3)
    ht.distribute(model, keras.optimizers.SGD(0.1))
    found = masks(comm, model)
    return {"apart": found, "alone": np.asarray(alone.layers[0](np.ones((1, 64)), training=True))[0].tolist()}


@stream
def masks_after_fit_and_loading(comm):
    keras.utils.set_random_seed(0)
    model, optimizer = ht.distribute(dropping(), keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse")
    data = ht.shard((np.ones((8, 64)), np.ones((8, 2))), batch_size=4)
    model.fit(data, epochs=2, verbose=0)
    first = masks(comm, model)
    for variable in model.variables:
        if variable.path.endswith("seed_generator_state"):
            variable.assign([3, 0])
    model.fit(data, epochs=1, verbose=0)
    return {"apart": first, "apart, later": masks(comm, model)}


if __name__ == "__main__":
    run(ALIKE | DIFFER | STREAMS, lambda comm: keras.utils.set_random_seed(1))

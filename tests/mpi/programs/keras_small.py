"""A network with its samples and a step, and what a refusal is to say."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
LOSS = keras.losses.BinaryCrossentropy()


def network() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation="sigmoid", name="only")])


def samples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, 4)).astype("float32")
    return x, (x.sum(1) + random.normal(size=count) > 0).astype("float32")[:, None], random.random(count)


def update(model, optimizer, x, y):
    with tf.GradientTape() as tape:
        loss = LOSS(y, model(x))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def refused(action, code: str, kind: type[Exception] = Exception) -> str:
    """The text of the error of ``action``, which TensorFlow may have made another of."""
    try:
        action()
    except kind as error:
        assert f"[{code}]" in str(error), repr(error)
        return str(error)
    raise AssertionError(f"nothing was raised, wanted: {code}")

"""The backends of tf.distribute by scripts: what they train, and what is refused.

``python keras_strategies.py OUT`` under ``hpctrain run --backend NAME``; ``plain`` as a second argument: one process
that knows of no strategy.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from situations import refusal

import hpctrain as ht
from hpctrain.worker.comm.base import Communicator
from hpctrain.worker.models.keras_digits import digits_cnn

# Of losses too, which are made below.
keras.config.set_floatx("float64")

# Keras 3 sees to no batches that replicas cannot divide evenly.
STEPS, BATCH = 20, 18
_RANDOM = np.random.default_rng(0)
X = _RANDOM.random((STEPS, BATCH, 8, 8, 1))
Y = _RANDOM.integers(0, 10, (STEPS, BATCH))
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def made() -> tuple[keras.Model, keras.optimizers.Optimizer]:
    keras.utils.set_random_seed(0)
    return digits_cnn(), keras.optimizers.AdamW(1e-3)


def batches() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y))


def fit(model: keras.Model, optimizer: keras.optimizers.Optimizer, data: tf.data.Dataset) -> keras.Model:
    model.compile(optimizer, LOSS)
    model.fit(data, verbose=0)
    return model


def mirrored(strategy: tf.distribute.Strategy) -> dict[str, keras.Model]:
    """``fit`` cuts each batch by the replicas, and Keras adds their gradients up."""
    with strategy.scope():
        model, optimizer = made()
    return {"fit": fit(model, optimizer, batches())}


def multi_worker(strategy: tf.distribute.Strategy, comm: Communicator) -> dict[str, keras.Model]:
    distributed = fit(*ht.distribute(*made()), ht.shard(batches()))
    with strategy.scope():
        model, optimizer = made()
        optimizer.build(model.trainable_variables)

    def part(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
            loss = tf.reduce_sum(losses) / BATCH
        # It adds up over the workers by itself.
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    step = tf.function(lambda x, y: strategy.run(part, (x, y)), reduce_retracing=True)
    own = slice(comm.rank * BATCH // comm.size, (comm.rank + 1) * BATCH // comm.size)
    for x, y in zip(X, Y, strict=True):
        step(tf.constant(x[own]), tf.constant(y[own]))
    return {"fit": distributed, "loop": model}


def parameter_server(strategy: tf.distribute.Strategy) -> dict[str, keras.Model]:
    """One batch after the other, each waited for, which is what one process does."""
    coordinator = ht.keras.coordinator()
    with strategy.scope():
        model, optimizer = made()
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        def part() -> None:
            with tf.GradientTape() as tape:
                loss = LOSS(y, model(x, training=True))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        strategy.run(part)

    for x, y in zip(X, Y, strict=True):
        coordinator.schedule(step, args=(tf.constant(x), tf.constant(y)))
        coordinator.join()
    return {"loop": model}


def misuse(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    with strategy.scope():
        model, optimizer = made()
        model.compile(optimizer, LOSS)
    return {"distribute": refusal(lambda: ht.distribute(model, optimizer))}


def main(out: str, *kind: str) -> None:
    found: dict[str, Any] = {}
    if kind:
        models, rank = {"plain": fit(*made(), batches())}, 0
    else:
        comm = ht.init()
        strategy, rank = ht.keras.strategy(), comm.rank
        if comm.backend == "multi_worker":
            models = multi_worker(strategy, comm)
        else:
            models = {"mirrored": mirrored, "parameter_server": parameter_server}[comm.backend](strategy)
        found = {"TF_CONFIG": os.environ.get("TF_CONFIG", ""), **misuse(strategy)}
    for name, model in models.items():
        np.savez(f"{out}-{name}-{rank}.npz", *(each.numpy() for each in model.trainable_variables))
    Path(f"{out}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Trains small networks for 20 updates, plainly on the full batch or with hpctrain on this rank's part.

``python keras_equivalence.py OUT plain|BACKEND=CASE,… …`` writes OUT-BACKEND-RANK.npz with each case's weights. The
plain run does all cases and imports no hpctrain.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

SAMPLES, BATCH, UPDATES = 70, 17, 20  # batches of 17, 17, 17, 17 and 2: some ranks of 3 and 4 get none of the last
DISTRIBUTED = sys.argv[2:] != ["plain"]
COMM = None


@dataclass(frozen=True)
class Case:
    optimizer: Callable[[], keras.optimizers.Optimizer]
    loop: str = "fit"
    policy: str = "float64"
    network: str = "dense"
    accumulate: int = 1
    overflow: bool = False
    built: bool = True
    arrays: bool = False
    compression: str = "none"


def sgd(**settings):
    return keras.optimizers.SGD(0.1, momentum=0.9, **settings)


def adam(**settings):
    return keras.optimizers.Adam(0.01, **settings)


CASES = {
    "momentum": Case(sgd),
    "nesterov_built_later": Case(lambda: sgd(nesterov=True), built=False),
    "adam": Case(adam, loop="graph"),
    "adamw": Case(lambda: keras.optimizers.AdamW(0.01, weight_decay=0.05), loop="eager"),
    "adam_fit_eagerly": Case(adam, loop="fit_eagerly"),
    "clipped": Case(lambda: sgd(global_clipnorm=0.3), loop="graph"),
    "accumulated_2": Case(lambda: sgd(gradient_accumulation_steps=2, global_clipnorm=0.3), accumulate=2),
    "accumulated_3": Case(lambda: adam(gradient_accumulation_steps=3), accumulate=3, loop="graph"),
    "accumulated_eagerly": Case(lambda: sgd(gradient_accumulation_steps=2), accumulate=2, loop="eager"),
    "embedding": Case(lambda: sgd(nesterov=True), network="embedding"),
    "embedding_graph": Case(sgd, network="embedding", loop="graph"),
    "arrays_shuffled": Case(sgd, arrays=True),
    "float32": Case(sgd, policy="float32"),
    "overflow": Case(sgd, policy="mixed_float16", overflow=True),
    "overflow_graph": Case(
        lambda: keras.optimizers.LossScaleOptimizer(sgd()), policy="mixed_float16", overflow=True, loop="graph"
    ),
    "bfloat16": Case(lambda: keras.optimizers.SGD(0.1), policy="bfloat16"),
    "wire_fp16": Case(sgd, policy="float32", compression="fp16"),
    "wire_bf16": Case(sgd, policy="float32", compression="bf16", loop="graph"),
}


def network(case: Case) -> keras.Model:
    layers = [keras.Input((8,))] if case.built else []
    if case.network == "embedding":
        layers += [
            keras.layers.Rescaling(9.0),
            keras.layers.Embedding(10, 6),
            keras.layers.GlobalAveragePooling1D(),
        ]
    if not case.overflow:  # tanh would saturate, and pass no gradient on
        layers.append(keras.layers.Dense(12, activation="tanh"))
    layers.append(keras.layers.Dense(5))
    return keras.Sequential(layers)


def samples(case: Case) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    x, y = random.random((SAMPLES, 8)), random.integers(0, 5, SAMPLES)
    if case.overflow:
        x[3, 0] = 2e3  # in the first rank's part of the first batch of every epoch
    return x.astype("float64" if case.policy == "float64" else "float32"), y


def plain_batches(case: Case) -> list:
    """Global batches of every epoch, as plain Keras code would make them."""
    x, y = samples(case)
    epochs = []
    for epoch in range(UPDATES * case.accumulate // 5):
        order = np.random.default_rng((0, epoch)).permutation(SAMPLES) if case.arrays else np.arange(SAMPLES)
        epochs.append(tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(BATCH))
    return epochs


def batches(case: Case) -> list:
    if not DISTRIBUTED:
        return plain_batches(case)
    import hpctrain as ht

    if case.arrays:
        return [ht.shard(samples(case), batch_size=BATCH)] * (UPDATES // 5)
    return [ht.shard(epoch) for epoch in plain_batches(case)]


def train(case: Case) -> np.ndarray:
    keras.config.set_floatx(case.policy if case.policy == "float64" else "float32")
    keras.config.set_dtype_policy(case.policy)
    keras.utils.set_random_seed(7 + (COMM.rank if COMM else 0))  # ranks start from different weights
    model, optimizer = network(case), case.optimizer()
    callbacks = []
    if DISTRIBUTED:
        import hpctrain as ht

        model, optimizer = ht.distribute(model, optimizer, compression=case.compression, guard_every=7)
        callbacks = ht.keras.callbacks(guard_every=7)
    model.build((None, 8))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if case.loop.startswith("fit"):
        model.compile(optimizer, loss, run_eagerly=case.loop == "fit_eagerly")
        for epoch in batches(case):
            model.fit(epoch, verbose=0, callbacks=callbacks)
    else:
        loop(case, model, optimizer, loss)
    weights = [np.asarray(keras.ops.cast(w, "float64")).ravel() for w in model.weights]
    scaling = model.optimizer if case.loop.startswith("fit") else optimizer
    scale = [scaling.dynamic_scale.numpy()] if case.policy == "mixed_float16" else []
    return np.concatenate([*weights, scale])


def loop(case: Case, model: keras.Model, optimizer: keras.optimizers.Optimizer, loss: keras.losses.Loss) -> None:
    def step(x, y, weight=None, share=1.0):
        with tf.GradientTape() as tape:
            value = optimizer.scale_loss(loss(y, model(x, training=True), sample_weight=weight) * share)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    run = tf.function(step, reduce_retracing=True) if case.loop == "graph" else step
    for epoch in batches(case):
        for batch in epoch:
            run(*batch)


def main() -> None:
    global COMM
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    out, *parts = sys.argv[1:]
    for backend, _, names in (part.partition("=") for part in parts):
        if DISTRIBUTED:
            import hpctrain as ht

            ht.shutdown()
            COMM = ht.init(backend)
        results = {name: train(CASES[name]) for name in (names.split(",") if names else CASES)}
        np.savez(f"{out}-{backend}-{COMM.rank if COMM else 0}.npz", **results)


if __name__ == "__main__":
    main()

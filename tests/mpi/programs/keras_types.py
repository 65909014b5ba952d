"""What a reduction may do wrong beside the mean: types, loss scaling, narrowed messages; and states made later."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses
from keras_runs import PATTERNS, Run, adam, sgd

EPOCHS, CLASSES = 5, 5


def typed(run: Run, make, policy: str = "float64", *, loop: str = "fit", built: bool = True, wire: str = "none"):
    """Train a network of a type, with what travels between the ranks narrowed to ``wire``."""
    keras.config.set_floatx("float64" if policy == "float64" else "float32")
    keras.config.set_dtype_policy(policy)
    try:
        overflow = policy == "mixed_float16"
        # tanh would saturate, and pass no gradient on.
        hidden = [] if overflow else [layers.Dense(12, activation="tanh")]
        model = keras.Sequential([*([keras.Input((8,))] if built else []), *hidden, layers.Dense(CLASSES)])
        optimizer = make()
        if run.distributed:
            model, optimizer = run.ht.distribute(model, optimizer, compression=wire, guard_every=7)
        model.build((None, 8))
        x, y = run.random.random((run.samples, 8)), run.labels(CLASSES)
        if overflow:
            x[3, 0] = 2e3  # in the first rank's part of the first batch of every epoch
        data = run.data(x.astype("float64" if policy == "float64" else "float32"), y)
        loss = losses.SparseCategoricalCrossentropy(from_logits=True)
        if loop == "fit":
            model.compile(optimizer, loss)
            model.fit(data, epochs=EPOCHS, verbose=0, callbacks=run.callbacks())
            optimizer = model.optimizer
        else:
            _loop(model, optimizer, loss, data)
        scale = [optimizer.dynamic_scale.numpy()] if overflow else []
        assert all(each < 2.0**15 for each in scale), "nothing overflowed"
        return [keras.ops.convert_to_numpy(keras.ops.cast(each, "float64")) for each in model.weights] + scale
    finally:
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")


def _loop(model, optimizer, loss, data) -> None:
    @tf.function(reduce_retracing=True)
    def step(x, y, weight=None, share=1.0):
        with tf.GradientTape() as tape:
            value = optimizer.scale_loss(loss(y, model(x, training=True), sample_weight=weight) * share)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    for _ in range(EPOCHS):
        for batch in data:
            step(*batch)


def arrays_in_the_documented_order(run: Run):
    """Shuffled by the seed and the epoch."""
    model, optimizer = run.distribute(keras.Sequential([keras.Input((8,)), layers.Dense(1)]), sgd())
    model.compile(optimizer, "mse")
    x, y = run.normal(8), run.normal(1)
    sharded = run.ht.shard((x, y), batch_size=run.batch) if run.distributed else None
    for epoch in range(2):
        order = np.random.default_rng((0, epoch)).permutation(run.samples)
        model.fit(sharded or run.whole(x[order], y[order]), verbose=0, callbacks=run.callbacks())
    return model.get_weights()


PATTERNS |= {
    "built_in_the_first_step": lambda run: typed(run, lambda: sgd(nesterov=True), built=False),
    "clipped_in_a_graph": lambda run: typed(run, lambda: sgd(global_clipnorm=0.3), loop="graph"),
    "accumulated_in_a_graph": lambda run: typed(run, lambda: adam(gradient_accumulation_steps=3), loop="graph"),
    "float32": lambda run: typed(run, sgd, "float32"),
    "overflow": lambda run: typed(run, sgd, "mixed_float16"),
    "bfloat16": lambda run: typed(run, lambda: keras.optimizers.SGD(0.1), "bfloat16"),
    "narrowed_to_fp16": lambda run: typed(run, sgd, "float32", wire="fp16"),
    "narrowed_to_bf16": lambda run: typed(run, sgd, "float32", loop="graph", wire="bf16"),
    "arrays_in_the_documented_order": arrays_in_the_documented_order,
}

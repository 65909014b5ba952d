"""What scripts for Horovod with Keras do, each against one process on all samples; it knows nothing of hpctrain.

Writes ``said-RANK.json`` into the folder of its argument.
"""

import json
import sys
from pathlib import Path

import horovod.keras as hvd_keras
import horovod.tensorflow as hvd_tf
import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import tensorflow as tf

hvd.init()
keras.config.set_floatx("float64")
numbers = np.random.default_rng(0)
X, Y = numbers.standard_normal((16, 3)), numbers.standard_normal((16, 1))
OWN = slice(hvd.rank(), None, hvd.size())
START = numbers.standard_normal((3, 1))
said = {}


def model_of(start=START):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([start])
    return model


def one_process(rate, steps, start=START):
    """Steps of gradient descent on the mean of squares of all samples."""
    weights = start
    for _ in range(steps):
        weights = weights - rate * 2 * X.T @ (X @ weights - Y) / len(X)
    return weights


def fit(optimizer, *, model=None, epochs=3, callbacks=(), own=OWN):
    model = model or model_of()
    model.compile(optimizer, "mse")
    model.fit(X[own], Y[own], batch_size=16, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def away(model, expected):
    """How far the weights are from those of one process, on any rank."""
    own = np.abs(model.get_weights()[0] - expected).max()
    return float(hvd_tf.allreduce(tf.constant(own), op=hvd_tf.Sum).numpy())


def refused(call):
    try:
        call()
    except Exception as error:
        return getattr(error, "code", type(error).__name__)


SGD = keras.optimizers.SGD
said["fit"] = away(fit(hvd.DistributedOptimizer(SGD(0.1))), one_process(0.1, 3))
said["sum"] = away(fit(hvd.DistributedOptimizer(SGD(0.05), op=hvd.Sum)), one_process(0.05 * hvd.size(), 3))
predivided = hvd.DistributedOptimizer(SGD(0.1), gradient_predivide_factor=2.0, groups=1)
said["predivided"] = away(fit(predivided), one_process(0.1, 3))
if hvd.size() > 1:
    # Each rank begins elsewhere; the callback sends rank 0's weights after the first step.
    other = fit(
        hvd.DistributedOptimizer(SGD(0.0)),
        model=model_of(START + hvd.rank()),
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    said["broadcast"] = away(other, START)

# A loop of one's own, as in tensorflow2_mnist.py.
model, optimizer = model_of(START + hvd.rank()), SGD(0.1)
hvd_tf.broadcast_variables(model.variables, root_rank=0)
for _ in range(3):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(X[OWN]) - Y[OWN]) ** 2)
    tape = hvd_tf.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
said["tape"] = away(model, one_process(0.1, 3))

logs = {}
warmup = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.2, warmup_epochs=2, steps_per_epoch=1)
last = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, found: logs.update(found))
metrics = hvd.callbacks.MetricAverageCallback()
warmed = fit(hvd.DistributedOptimizer(SGD(0.2)), callbacks=[warmup, metrics, last])
said["rate"] = float(warmed.optimizer.learning_rate.numpy())
said["loss"] = float(logs["loss"])

# A model that was saved goes on, also where Horovod is not asked for.
saved = Path(sys.argv[1], f"model-{hvd.rank()}.keras")
fit(hvd.DistributedOptimizer(SGD(0.1, momentum=0.5)), epochs=2).save(saved)
loaded = hvd_keras.load_model(saved)
loaded.fit(X[OWN], Y[OWN], batch_size=16, shuffle=False, verbose=0)
alone = fit(SGD(0.1, momentum=0.5), own=slice(None))
said["loaded"] = away(loaded, alone.get_weights()[0])
said["saved"] = type(keras.models.load_model(saved, safe_mode=True).optimizer) is SGD

said["refused"] = [refused(lambda: hvd.DistributedOptimizer(SGD(0.1), backward_passes_per_step=2))]

# One rank's infinite gradient makes all of them skip the step.
keras.config.set_dtype_policy("mixed_float16")
said["refused"].append(refused(lambda: hvd.DistributedOptimizer(SGD(0.1))))
keras.config.set_dtype_policy("float64")
scaled = keras.optimizers.LossScaleOptimizer(SGD(0.1), initial_scale=8.0)
if hvd.rank() == 1:
    Y = Y * np.inf
skipped = fit(hvd.DistributedOptimizer(scaled), epochs=1)
said["skipped"] = away(skipped, START)
Path(sys.argv[1], f"said-{hvd.rank()}.json").write_text(json.dumps(said))

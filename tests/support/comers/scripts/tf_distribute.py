"""After TensorFlow's tutorial of custom loops with MultiWorkerMirroredStrategy, whose workers TF_CONFIG names."""

import json
import os

import keras
import numpy as np
import tensorflow as tf

tf_config = json.loads(os.environ.get("TF_CONFIG", '{"cluster": {"worker": ["localhost:1"]}, "task": {"index": 0}}'))
workers = len(tf_config["cluster"]["worker"])
chief = tf_config["task"]["index"] == 0
strategy = tf.distribute.MultiWorkerMirroredStrategy()
assert strategy.num_replicas_in_sync == workers
keras.config.set_floatx("float64")
keras.utils.set_random_seed(0)
numbers = np.random.default_rng(0)
x, y = numbers.standard_normal((64, 8)), numbers.integers(0, 3, 64)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(64).repeat(10)
batches = strategy.experimental_distribute_dataset(dataset)
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    loss_of_each = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


@tf.function
def train_step(batch):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of_each(y, model(x))) / 64
        gradients = tape.gradient(loss, model.trainable_variables)
        # Keras adds up the gradients of all replicas.
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step, args=batch), axis=None)


for step, batch in enumerate(batches):
    loss = train_step(batch)
    if chief:
        print(f"step {step} loss {float(loss)!r}")

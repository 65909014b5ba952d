"""What the patterns of keras_patterns.py have in common."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from situations import Named

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")

Dataset = tf.data.Dataset
PATTERNS = pattern = Named()
# Samples and those of a batch: 36 in batches of 12, which divide over 2 and 3 ranks; 34 in batches of 11, which do over
# neither, and of which the last has one.
KINDS = {"even": (36, 12), "uneven": (34, 11)}


class Run:
    """What a script gets from hpctrain, or on one process does without."""

    def __init__(self, distributed: bool, kind: str, comm) -> None:
        self.distributed = distributed
        self.comm = comm
        if distributed:
            import hpctrain as ht

            self.ht = ht
        self.samples, self.batch = KINDS[kind]
        self.random = np.random.default_rng(3)

    def distribute(self, model, optimizer):
        return self.ht.distribute(model, optimizer) if self.distributed else (model, optimizer)

    def shard(self, data):
        return self.ht.shard(data) if self.distributed else data

    def data(self, *arrays) -> Dataset:
        return self.shard(self.whole(*arrays))

    def whole(self, *arrays) -> Dataset:
        return Dataset.from_tensor_slices(arrays if len(arrays) > 1 else arrays[0]).batch(self.batch)

    def callbacks(self) -> list:
        return self.ht.keras.callbacks() if self.distributed else []

    def normal(self, *shape: int) -> np.ndarray:
        return self.random.normal(size=(self.samples, *shape))

    def labels(self, classes: int, *shape: int) -> np.ndarray:
        return self.random.integers(0, classes, (self.samples, *shape))

    def fit(self, model, data, epochs: int = 2, **settings):
        settings = {"callbacks": self.callbacks(), **settings}
        return model.fit(data, epochs=epochs, verbose=0, **settings).history


def dense(outputs: int = 1, *more) -> keras.Model:
    return keras.Sequential([keras.Input((4,)), layers.Dense(6, activation="tanh"), *more, layers.Dense(outputs)])


def sgd(**settings):
    return keras.optimizers.SGD(0.1, momentum=0.9, **settings)


def adam(**settings):
    return keras.optimizers.Adam(0.01, **settings)


def fitted(run: Run, model, optimizer, loss, *arrays, fit=None, **settings):
    """``compile`` and ``fit``, what most of the guides do.

    The optimizer is built between them: one that makes its variables in its first step has that step traced twice.
    """
    model, optimizer = run.distribute(model, optimizer)
    model.compile(optimizer, loss, **settings)
    model.optimizer.build(model.trainable_variables)
    return model.get_weights(), run.fit(model, run.data(*arrays), **(fit or {})), model.get_weights()

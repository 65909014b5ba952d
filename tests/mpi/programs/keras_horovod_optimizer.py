"""A Keras 3 script that trusts Horovod's own DistributedOptimizer, which reduces nothing on Keras 3."""

from __future__ import annotations

import horovod.tensorflow.keras as hvd
import keras
import numpy as np

import hpctrain as ht

comm = ht.init()
hvd.init()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="only")])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
x = np.random.default_rng(comm.rank).random((64, 4))
model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0, callbacks=ht.keras.callbacks())
print("trained to the end")

"""After Horovod's tensorflow2_keras_mnist.py: DistributedOptimizer, the broadcast callback."""

import horovod.tensorflow.keras as hvd
import keras
import numpy as np

hvd.init()
keras.config.set_floatx("float64")
keras.utils.set_random_seed(0)
numbers = np.random.default_rng(0)
x, y = numbers.standard_normal((64, 8)), numbers.integers(0, 3, 64)
x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(3)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=optimizer, loss=loss)


class PrintLoss(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if hvd.rank() == 0:
            print(f"step {epoch} loss {float(logs['loss'])!r}")


callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    PrintLoss(),
]
model.fit(x, y, batch_size=64 // hvd.size(), epochs=10, shuffle=False, callbacks=callbacks, verbose=0)

"""Records the steps and epochs of a script that trains with Keras's ``fit``."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np

from hpctrain.worker.adapters.keras.reducing import distributed_optimizers, reduction_of
from hpctrain.worker.adapters.recording import Recording, recording
from hpctrain.worker.comm import Communicator


class RecordSteps(keras.callbacks.Callback):  # type: ignore[misc]
    """Records each batch as a step with its learning rate, and the joined metrics of an epoch."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm
        self._counted: Recording | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        own = recording()
        # Keras counts those of a model that is called itself, and not only by its parts.
        parameters = sum(math.prod(weight.shape) for weight in self.model.weights)
        if own and own.begin_run(self._comm, "keras", self.model, parameters):
            self._counted = own

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._counted:
            optimizer = self.model.optimizer
            if reduction_of(optimizer) is None:
                # A GAN has optimizers of its own, and compile makes one that nobody uses.
                optimizer = next(iter(distributed_optimizers(self.model)), optimizer)
            self._counted.step_done(None if optimizer is None else float(optimizer.learning_rate))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        values = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
        if self._counted and values:
            # fit prints what it is asked to.
            self._counted.log(values, quiet=True)

"""An average of a Keras model's parameters and statistics over the run."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from hpctrain.worker.comm import Communicator
from hpctrain.worker.models.batch_norm import means_over_ranks


class KerasAverage:
    """A copy of all values that a model computes with, which follows the model.

    Attributes:
        trainable, others: the averages in the model's order; ``others`` differ between ranks.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.trainable = [_copy(each) for each in model.trainable_variables]
        self.others = [_copy(each) for each in model.non_trainable_variables]
        self._update = tf.function(self._traced_update, autograph=False)

    def update(self, weight: float) -> None:
        """Move the average by ``weight`` of the way to the model; counters become the model's."""
        self._update(tf.constant(weight, tf.float32))

    def average_statistics(self, comm: Communicator) -> None:
        """Replace the average's statistics by their plain mean over the ranks."""
        statistics = [each for each in self.others if _is_float(each)]
        means = means_over_ranks([np.asarray(each.value) for each in statistics], comm)
        for each, mean in zip(statistics, means, strict=True):
            each.assign(mean)

    def take(self) -> None:
        """Copy the average into the model."""
        for variable, each in self._pairs():
            variable.assign(each.value)

    def logits(self, images: tf.Tensor) -> tf.Tensor:
        """The model's output with the averaged values."""
        here = ([tf.convert_to_tensor(each.value) for each in group] for group in (self.trainable, self.others))
        logits, _ = self._model.stateless_call(*here, images, training=False)
        return logits

    def _pairs(self) -> list[tuple[keras.Variable, keras.Variable]]:
        variables = [*self._model.trainable_variables, *self._model.non_trainable_variables]
        return list(zip(variables, [*self.trainable, *self.others], strict=True))

    def _traced_update(self, weight: tf.Tensor) -> None:
        for variable, each in self._pairs():
            now = tf.convert_to_tensor(variable.value)
            if _is_float(each):
                before = tf.convert_to_tensor(each.value)
                # A weight of 1 has to give exactly the model's bits.
                moved = before + tf.cast(weight, before.dtype) * (now - before)
                each.assign(tf.where(weight == 1, now, moved))
            else:
                each.assign(now)


def _copy(variable: keras.Variable) -> keras.Variable:
    # Through NumPy: a keras.Variable made from a tf.Variable would share it.
    return keras.Variable(np.asarray(variable.value), trainable=False, dtype=variable.dtype)


def _is_float(variable: keras.Variable) -> bool:
    return bool(tf.as_dtype(variable.dtype).is_floating)

"""The mean of the ranks' Keras parameters, and an outer optimizer's step with it."""

from __future__ import annotations

import time

import keras
import numpy as np
import tensorflow as tf

from hpctrain.common.recipes.sync import Outer
from hpctrain.worker.comm import Communicator
from hpctrain.worker.comm.graph_errors import original_errors_raised


class KerasOuter:
    """The counterpart of :class:`hpctrain.worker.train.torch_outer.TorchOuter` for a Keras model.

    Attributes:
        state: the outer optimizer's momentum by name in a checkpoint, one variable for each parameter.
        seconds: how long the last reduction took.
    """

    def __init__(self, model: keras.Model, comm: Communicator, outer: Outer) -> None:
        self._parameters = model.trainable_variables
        self._engine = comm.tensorflow()
        self._outer = outer if outer.optimizer == "nesterov" else None
        self._before = [tf.Variable(each.value) for each in self._parameters] if self._outer else []
        self.state = {f"outer.{i}": _zeros(each) for i, each in enumerate(self._parameters) if self._outer}
        self.seconds = 0.0

    def step(self) -> None:
        """Replace the parameters by what the recipe makes of their mean. Collective."""
        begin = time.perf_counter()
        with original_errors_raised():
            own = [tf.convert_to_tensor(each.value) for each in self._parameters]
            means = self._engine.allreduce(own, "hpctrain.parameters")
        self.seconds = time.perf_counter() - begin
        if self._outer:
            means = self._moved(means, self._outer.learning_rate, self._outer.momentum)
        for parameter, mean in zip(self._parameters, means, strict=True):
            parameter.assign(mean)

    def restore(self) -> None:
        """Continue from a checkpoint whose parameters and momentum were already assigned to their variables."""
        for before, parameter in zip(self._before, self._parameters, strict=bool(self._before)):
            before.assign(parameter.value)

    def _moved(self, means: list[tf.Tensor], rate: float, momentum: float) -> list[tf.Tensor]:
        for before, velocity, mean in zip(self._before, self.state.values(), means, strict=True):
            gradient = before - mean
            velocity.assign(momentum * velocity.value + gradient)
            before.assign_sub(rate * (gradient + momentum * velocity.value))
        return [tf.convert_to_tensor(before) for before in self._before]


def _zeros(variable: keras.Variable) -> keras.Variable:
    return keras.Variable(np.zeros(variable.shape, variable.dtype), trainable=False, dtype=variable.dtype)

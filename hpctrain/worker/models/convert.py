"""Converts weights between the frameworks' networks, as NumPy arrays under the names of PyTorch's state dict.

Keras layers have the names of PyTorch's modules. Only the order of axes differs, and what a dense layer after a
``Flatten`` reads: (height, width, channel) in Keras and (channel, height, width) in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_NAMES = {
    "kernel": "weight",
    "bias": "bias",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}


def state_of(model: keras.Model) -> dict[str, Array]:
    """The weights and running statistics of a Keras network, as the state dict of the same network in PyTorch.

    ``load_state_dict({name: torch.from_numpy(array) for name, array in state_of(model).items()})`` takes it.
    """
    return {name: to_torch(np.asarray(variable.value)) for name, variable, to_torch, _ in _weights(model)}


def load_state(model: keras.Model, state: Mapping[str, Any]) -> None:
    """Give a Keras network the weights of the same network's state dict: arrays, or PyTorch tensors on the CPU."""
    for name, variable, _, to_keras in _weights(model):
        variable.assign(to_keras(np.asarray(state[name])))


Conversion = Callable[[Array], Array]


def _weights(model: keras.Model) -> Iterator[tuple[str, keras.Variable, Conversion, Conversion]]:
    """PyTorch's name of each weight, the weight, and the conversions of its array to PyTorch and back."""
    map_shape: tuple[int, ...] | None = None
    for layer in model.layers:
        for variable in layer.variables:
            to_torch, to_keras = _conversions(variable, map_shape)
            yield f"{layer.name}.{_NAMES[variable.name]}", variable, to_torch, to_keras
        if layer.variables:
            map_shape = None
        if isinstance(layer, keras.layers.Flatten):
            map_shape = tuple(layer.input.shape[1:])


def _conversions(variable: keras.Variable, map_shape: tuple[int, ...] | None) -> tuple[Conversion, Conversion]:
    if variable.name != "kernel":
        return np.array, np.array
    if len(variable.shape) == 4:
        # (height, width, in, out) to (out, in, height, width)
        return lambda w: w.transpose(3, 2, 0, 1).copy(), lambda w: w.transpose(2, 3, 1, 0)
    if map_shape is None:
        return lambda w: w.T.copy(), lambda w: w.T
    height, width, channels = map_shape
    return (
        lambda w: w.T.reshape(-1, height, width, channels).transpose(0, 3, 1, 2).reshape(len(w.T), -1),
        lambda w: w.reshape(-1, channels, height, width).transpose(0, 2, 3, 1).reshape(len(w), -1).T,
    )

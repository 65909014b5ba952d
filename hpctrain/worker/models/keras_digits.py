"""The network of the digits recipe in Keras; hpctrain.worker.models.torch_digits is the same in PyTorch."""

from __future__ import annotations

import keras
from keras import layers


def digits_cnn() -> keras.Model:
    """Images (N, 8, 8, 1) to logits (N, 10): three convolutions and two dense layers, no normalisation.

    Weights are drawn as He et al. 2015 (arXiv 1502.01852) propose; biases are zero. Layers have the names of PyTorch's
    modules, see :mod:`hpctrain.worker.models.convert`.
    """

    def convolution(name: str, channels: int) -> layers.Layer:
        return layers.Conv2D(channels, 3, padding="same", activation="relu", kernel_initializer=_he_normal(), name=name)

    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            convolution("0", 32),
            convolution("2", 64),
            layers.MaxPooling2D(2),
            convolution("5", 64),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(128, activation="relu", kernel_initializer=_he_normal(), name="9"),
            layers.Dense(10, kernel_initializer=_he_normal(), name="11"),
        ]
    )


def _he_normal() -> keras.Initializer:
    # Not "he_normal", which truncates the distribution, unlike PyTorch's.
    return keras.initializers.VarianceScaling(2.0, mode="fan_in", distribution="untruncated_normal")

"""The residual networks of hpctrain.models.torch_resnet in Keras: the same functions, drawn alike.

Layers have the names of torchvision's modules, see :mod:`hpctrain.models.convert`. Padding is explicit where the stride
is not 1: Keras' "same" then pads the far side more, PyTorch both sides alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import layers

from hpctrain.models.keras_batch_norm import BatchNorm

# Makes a batch norm, given its name and gamma_initializer.
Norm = Callable[..., layers.Layer]
# Of (norm, x, name, width, stride, zero_gamma).
Block = Callable[[Norm, Any, str, int, int, bool], Any]


def _conv(x: Any, name: str, outputs: int, size: int, stride: int = 1) -> Any:
    padding = "same"
    if size > 1 and stride > 1:
        x = layers.ZeroPadding2D(size // 2, name=f"{name}.padding")(x)
        padding = "valid"
    drawn = keras.initializers.VarianceScaling(2.0, mode="fan_out", distribution="untruncated_normal")
    return layers.Conv2D(outputs, size, stride, padding, use_bias=False, kernel_initializer=drawn, name=name)(x)


def _relu(x: Any, name: str) -> Any:
    return layers.ReLU(name=f"{name}.relu")(x)


def _sum(norm: Norm, block: tuple[Any, Any], name: str, stride: int) -> Any:
    """A block's input and output added up, the input projected where its shape changes (option B)."""
    x, y = block
    if stride > 1 or x.shape[-1] != y.shape[-1]:
        x = norm(name=f"{name}.downsample.1")(_conv(x, f"{name}.downsample.0", y.shape[-1], 1, stride))
    return _relu(layers.Add(name=f"{name}.sum")([y, x]), name)


def _basic(norm: Norm, x: Any, name: str, width: int, stride: int, zero_gamma: bool) -> Any:
    y = _conv(x, f"{name}.conv1", width, 3, stride)
    y = _relu(norm(name=f"{name}.bn1")(y), f"{name}.bn1")
    y = _conv(y, f"{name}.conv2", width, 3)
    y = norm(name=f"{name}.bn2", gamma_initializer="zeros" if zero_gamma else "ones")(y)
    return _sum(norm, (x, y), name, stride)


def _bottleneck(norm: Norm, x: Any, name: str, width: int, stride: int, zero_gamma: bool) -> Any:
    y = _conv(x, f"{name}.conv1", width, 1)
    y = _relu(norm(name=f"{name}.bn1")(y), f"{name}.bn1")
    y = _conv(y, f"{name}.conv2", width, 3, stride)
    y = _relu(norm(name=f"{name}.bn2")(y), f"{name}.bn2")
    y = _conv(y, f"{name}.conv3", 4 * width, 1)
    y = norm(name=f"{name}.bn3", gamma_initializer="zeros" if zero_gamma else "ones")(y)
    return _sum(norm, (x, y), name, stride)


def _resnet(block: Block, blocks: Sequence[int], *, classes: int, zero_gamma: bool, norm: Norm) -> keras.Model:
    """Images (N, H, W, 3) to logits (N, classes), for any H and W from 32 on."""
    images = keras.Input((None, None, 3))
    x = _relu(norm(name="bn1")(_conv(images, "conv1", 64, 7, 2)), "bn1")
    # Behind the ReLU a border of zeros is as good as one of minus infinity.
    x = layers.MaxPooling2D(3, 2, name="maxpool")(layers.ZeroPadding2D(1, name="maxpool.padding")(x))
    for index, count in enumerate(blocks):
        for number in range(count):
            stride = 2 if index and not number else 1
            x = block(norm, x, f"layer{index + 1}.{number}", 64 << index, stride, zero_gamma)
    x = layers.GlobalAveragePooling2D(name="avgpool")(x)
    logits = layers.Dense(classes, kernel_initializer=keras.initializers.RandomNormal(stddev=0.01), name="fc")(x)
    return keras.Model(images, logits)


def resnet18(classes: int = 1000, *, zero_gamma: bool = True, norm: Norm = BatchNorm) -> keras.Model:
    """11,689,512 parameters for 1000 classes."""
    return _resnet(_basic, (2, 2, 2, 2), classes=classes, zero_gamma=zero_gamma, norm=norm)


def resnet50(classes: int = 1000, *, zero_gamma: bool = True, norm: Norm = BatchNorm) -> keras.Model:
    """25,557,032 parameters for 1000 classes."""
    return _resnet(_bottleneck, (3, 4, 6, 3), classes=classes, zero_gamma=zero_gamma, norm=norm)


def resnet101(classes: int = 1000, *, zero_gamma: bool = True, norm: Norm = BatchNorm) -> keras.Model:
    """44,549,160 parameters for 1000 classes."""
    return _resnet(_bottleneck, (3, 4, 23, 3), classes=classes, zero_gamma=zero_gamma, norm=norm)

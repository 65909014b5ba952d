"""The residual networks of hpctrain.worker.models.torch_resnet in Keras: the same functions, drawn alike.

Layers have the names of torchvision's modules, see :mod:`hpctrain.worker.models.convert`. Padding is explicit where the
stride is not 1: Keras' "same" then pads the far side more, PyTorch both sides alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import layers

from hpctrain.common.recipes.sections import InitialWeights
from hpctrain.worker.models.keras_batch_norm import KerasBatchNorm

# Makes a batch norm, given its name and gamma_initializer.
Norm = Callable[..., layers.Layer]
_GOYAL = InitialWeights()


@dataclass(frozen=True, kw_only=True)
class _Layers:
    """The settings that all layers of one network share."""

    norm: Norm
    weights: InitialWeights
    zero_gamma: bool

    def conv(self, x: Any, name: str, outputs: int, size: int, stride: int = 1) -> Any:
        padding = "same"
        if size > 1 and stride > 1:
            x = layers.ZeroPadding2D(size // 2, name=f"{name}.padding")(x)
            padding = "valid"
        drawn = keras.initializers.VarianceScaling(
            self.weights.scale,
            mode=f"fan_{self.weights.fan}",
            distribution="truncated_normal" if self.weights.truncated else "untruncated_normal",
        )
        return layers.Conv2D(outputs, size, stride, padding, use_bias=False, kernel_initializer=drawn, name=name)(x)

    def last_norm(self, x: Any, name: str) -> Any:
        """The batch norm before a block's sum."""
        return self.norm(name=name, gamma_initializer="zeros" if self.zero_gamma else "ones")(x)

    def logits(self, x: Any, classes: int) -> Any:
        kernel, bias = keras.initializers.RandomNormal(stddev=0.01), keras.initializers.Zeros()
        if self.weights.last_layer == "uniform":
            bound = 1 / math.sqrt(x.shape[-1])
            kernel, bias = (keras.initializers.RandomUniform(-bound, bound) for _ in range(2))
        return layers.Dense(classes, kernel_initializer=kernel, bias_initializer=bias, name="fc")(x)


# A function of (layers, x, name, width, stride) that adds a block.
Block = Callable[[_Layers, Any, str, int, int], Any]


def _relu(x: Any, name: str) -> Any:
    return layers.ReLU(name=f"{name}.relu")(x)


def _sum(own: _Layers, block: tuple[Any, Any], name: str, stride: int) -> Any:
    """A block's input and output added up, the input projected where its shape changes (option B)."""
    x, y = block
    if stride > 1 or x.shape[-1] != y.shape[-1]:
        x = own.norm(name=f"{name}.downsample.1")(own.conv(x, f"{name}.downsample.0", y.shape[-1], 1, stride))
    return _relu(layers.Add(name=f"{name}.sum")([y, x]), name)


def _basic(own: _Layers, x: Any, name: str, width: int, stride: int) -> Any:
    y = own.conv(x, f"{name}.conv1", width, 3, stride)
    y = _relu(own.norm(name=f"{name}.bn1")(y), f"{name}.bn1")
    y = own.last_norm(own.conv(y, f"{name}.conv2", width, 3), f"{name}.bn2")
    return _sum(own, (x, y), name, stride)


def _bottleneck(own: _Layers, x: Any, name: str, width: int, stride: int) -> Any:
    y = own.conv(x, f"{name}.conv1", width, 1)
    y = _relu(own.norm(name=f"{name}.bn1")(y), f"{name}.bn1")
    y = own.conv(y, f"{name}.conv2", width, 3, stride)
    y = _relu(own.norm(name=f"{name}.bn2")(y), f"{name}.bn2")
    y = own.last_norm(own.conv(y, f"{name}.conv3", 4 * width, 1), f"{name}.bn3")
    return _sum(own, (x, y), name, stride)


def _resnet(block: Block, blocks: Sequence[int], own: _Layers, classes: int) -> keras.Model:
    """Images (N, H, W, 3) to logits (N, classes), for any H and W from 32 on."""
    images = keras.Input((None, None, 3))
    x = _relu(own.norm(name="bn1")(own.conv(images, "conv1", 64, 7, 2)), "bn1")
    # After the ReLU a border of zeros is as good as one of minus infinity.
    x = layers.MaxPooling2D(3, 2, name="maxpool")(layers.ZeroPadding2D(1, name="maxpool.padding")(x))
    for index, count in enumerate(blocks):
        for number in range(count):
            stride = 2 if index and not number else 1
            x = block(own, x, f"layer{index + 1}.{number}", 64 << index, stride)
    return keras.Model(images, own.logits(layers.GlobalAveragePooling2D(name="avgpool")(x), classes))


def _network(block: Block, *blocks: int) -> Callable[..., keras.Model]:
    def make(
        classes: int = 1000, *, zero_gamma: bool = True, weights: InitialWeights = _GOYAL, norm: Norm = KerasBatchNorm
    ) -> keras.Model:
        return _resnet(block, blocks, _Layers(norm=norm, weights=weights, zero_gamma=zero_gamma), classes)

    return make


# As many parameters as the networks in PyTorch.
resnet18, resnet50 = _network(_basic, 2, 2, 2, 2), _network(_bottleneck, 3, 4, 6, 3)
resnet101 = _network(_bottleneck, 3, 4, 23, 3)

"""Residual networks for ImageNet in PyTorch (He et al. 2015, arXiv 1512.03385), as large minibatches train them.

Against that paper, after Goyal et al. 2017 (arXiv 1706.02677, section 5.1): the stride of a bottleneck is on its 3x3
convolution ("v1.5"), and the last batch norm of each block starts with gamma 0, so that every block starts as the
identity. Parameters have torchvision's names, so that its weights fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from hpctrain.common.recipes.sections import InitialWeights
from hpctrain.worker.models.torch_batch_norm import TorchBatchNorm

# Makes a batch norm for a number of channels.
Norm = Callable[[int], nn.BatchNorm2d]
_GOYAL = InitialWeights()
# The standard deviation of a standard normal distribution truncated at two deviations.
_TRUNCATED_DEVIATION = 0.87962566103423978


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    """The input in the shape of the block's output: a projection only where the shape changes (option B)."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(_conv(inputs, outputs, 1, stride), norm(outputs))


class Basic(nn.Module):
    """Two 3x3 convolutions around a shortcut. ``last`` is the batch norm before the sum."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 3, stride)
        self.bn1 = norm(width)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = norm(width)
        self.downsample = _shortcut(inputs, width, stride, norm)

    @property
    def last(self) -> nn.BatchNorm2d:
        return self.bn2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut. ``last`` is the batch norm before the sum."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = _conv(inputs, width, 1)
        self.bn1 = norm(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = norm(width)
        self.conv3 = _conv(width, outputs, 1)
        self.bn3 = norm(outputs)
        self.downsample = _shortcut(inputs, outputs, stride, norm)

    @property
    def last(self) -> nn.BatchNorm2d:
        return self.bn3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet(nn.Module):
    """Images (N, 3, H, W) to logits (N, classes), for any H and W from 32 on.

    Args:
        blocks: how many blocks each stage has; the width doubles from stage to stage, from 64 on.
        zero_gamma: whether each block starts as the identity.
        weights: the distributions of the convolutions and the last layer.
        norm: makes a batch norm for a number of channels.
    """

    def __init__(
        self,
        block: type[Basic] | type[Bottleneck],
        blocks: Sequence[int],
        *,
        classes: int,
        zero_gamma: bool,
        weights: InitialWeights,
        norm: Norm,
    ) -> None:
        super().__init__()
        self.conv1 = _conv(3, 64, 7, 2)
        self.bn1 = norm(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.stages: list[str] = []
        channels = 64
        for index, count in enumerate(blocks):
            width = 64 << index
            members = []
            for number in range(count):
                members.append(block(channels, width, 2 if index and not number else 1, norm))
                channels = width * block.expansion
            self.stages.append(f"layer{index + 1}")
            self.add_module(self.stages[-1], nn.Sequential(*members))
        self.fc = nn.Linear(channels, classes)
        self._draw(zero_gamma, weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        logits: torch.Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits

    def _draw(self, zero_gamma: bool, weights: InitialWeights) -> None:
        """Draw convolutions and the last layer. Other batch norms keep gamma 1, and all keep bias 0."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                _draw_convolution(module.weight, weights)
            elif isinstance(module, Basic | Bottleneck) and zero_gamma:
                nn.init.zeros_(module.last.weight)
        if weights.last_layer == "normal":
            nn.init.normal_(self.fc.weight, std=0.01)
            nn.init.zeros_(self.fc.bias)
        else:
            self.fc.reset_parameters()


def _draw_convolution(kernel: torch.Tensor, weights: InitialWeights) -> None:
    outputs, inputs, *size = kernel.shape
    fan = (inputs if weights.fan == "in" else outputs) * math.prod(size)
    deviation = math.sqrt(weights.scale / fan)
    if weights.truncated:
        untruncated = deviation / _TRUNCATED_DEVIATION
        nn.init.trunc_normal_(kernel, std=untruncated, a=-2 * untruncated, b=2 * untruncated)
    else:
        nn.init.normal_(kernel, std=deviation)


def _resnet(block: type[Basic] | type[Bottleneck], *blocks: int) -> Callable[..., ResNet]:
    def make(
        classes: int = 1000, *, zero_gamma: bool = True, weights: InitialWeights = _GOYAL, norm: Norm = TorchBatchNorm
    ) -> ResNet:
        return ResNet(block, blocks, classes=classes, zero_gamma=zero_gamma, weights=weights, norm=norm)

    return make


# 11,689,512, 25,557,032 and 44,549,160 parameters for 1000 classes.
resnet18, resnet50 = _resnet(Basic, 2, 2, 2, 2), _resnet(Bottleneck, 3, 4, 6, 3)
resnet101 = _resnet(Bottleneck, 3, 4, 23, 3)

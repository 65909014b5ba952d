"""Residual networks in plain PyTorch with torchvision's modules, written after its documentation."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """A block as torchvision documents it: ``conv1, bn1, relu, conv2, bn2[, conv3, bn3][, downsample]``."""

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        for number, (before, after, size, step) in enumerate(
            sizes if bottleneck else [(inputs, width, 3, stride), (width, width, 3, 1)], 1
        ):
            setattr(self, f"conv{number}", nn.Conv2d(before, after, size, step, size // 2, bias=False))
            setattr(self, f"bn{number}", nn.BatchNorm2d(after))
        self.count = 3 if bottleneck else 2
        self.downsample = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for number in range(1, self.count + 1):
            y = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(y))
            if number < self.count:
                y = torch.relu(y)
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class DocumentedResNet(nn.Module):
    """A residual network with torchvision's modules, written after its documentation."""

    def __init__(self, blocks: tuple[int, ...], *, bottleneck: bool, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels = 64
        for stage, count in enumerate(blocks, 1):
            width = 32 << stage
            members = []
            for number in range(count):
                stride = 2 if stage > 1 and not number else 1
                members.append(Block(channels, width, stride, bottleneck=bottleneck))
                channels = 4 * width if bottleneck else width
            setattr(self, f"layer{stage}", nn.Sequential(*members))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        for stage in range(1, 5):
            x = getattr(self, f"layer{stage}")(x)
        return self.fc(self.avgpool(x).flatten(1))


def random_statistics(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 1)
            module.bias.data.normal_(std=0.1)
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2)

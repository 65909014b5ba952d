"""The network of the digits recipe in PyTorch; hpctrain.worker.models.keras_digits is the same in Keras."""

from __future__ import annotations

from torch import nn


def digits_cnn() -> nn.Module:
    """Images (N, 1, 8, 8) to logits (N, 10): three convolutions and two dense layers, no normalisation.

    Weights are drawn as He et al. 2015 (arXiv 1502.01852) propose; biases are zero.
    """
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return model

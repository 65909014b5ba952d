"""A small transformer encoder in PyTorch for benchmarks (Vaswani et al. 2017, arXiv 1706.03762)."""

from __future__ import annotations

import torch
from torch import nn


class Encoder(nn.Module):
    """Tokens (N, T) to logits (N, T, tokens): a few encoder layers with learned positions, normalised ahead.

    The output layer is the embedding's transpose (Press and Wolf 2016, arXiv 1608.05859).

    Args:
        tokens: the size of the vocabulary.
        length: the largest T that has a position.
        width: the model's width; the feed-forward parts are four times as wide.
    """

    def __init__(self, *, tokens: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Parameter(torch.empty(length, width))
        for weight in (self.embedding.weight, self.position):
            nn.init.normal_(weight, std=0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x) + self.position[: x.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.linear(self.norm(hidden), self.embedding.weight)


def small_encoder() -> Encoder:
    """10,268,928 parameters: 8192 tokens, at most 64 in a row, 4 layers of width 384 with 6 heads."""
    return Encoder(tokens=8192, length=64, width=384, layers=4, heads=6)

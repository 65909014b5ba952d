"""GPT in PyTorch: the network of GPT-2 (Radford et al. 2019), with nanoGPT's initial weights.

Source: https://github.com/karpathy/nanoGPT at 3adf61e1, model.py: blocks that normalise ahead (lines 94 to 106), GELU
by the error function (83), no dropout, which is 0 in its pretraining (train.py, line 55).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from hpctrain.common.recipes.gpt import GptSettings

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

# Of hidden states (…, width) and the output layer's weight (vocabulary, width).
Judge = Callable[[torch.Tensor, torch.Tensor], Any]
# model.py, lines 145 and 164.
_DEVIATION = 0.02


def tensor_plan() -> dict[str, ParallelStyle]:
    """The division of layers over tp: each rank has some of the heads and a part of the MLP's inner width.

    After Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3): two all-reduces of activations per block in
    either direction.
    """
    # Imported here because it takes a second, which only tensor-parallel ranks need.
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    columns = dict.fromkeys(("attention.query", "attention.key", "attention.value", "mlp.up"), ColwiseParallel)
    rows = dict.fromkeys(("attention.output", "mlp.down"), RowwiseParallel)
    return {f"blocks.*.{name}": style() for name, style in {**columns, **rows}.items()}


class Attention(nn.Module):
    """Causal self-attention over (N, T, width).

    The number of heads follows from the query's outputs, so that a rank may have only some of the heads.
    """

    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        self._head_size = settings.width // settings.heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(settings.width, settings.width, bias=settings.bias) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self._head_size)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class MLP(nn.Module):
    """The feed-forward part of a block."""

    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        self.up = nn.Linear(settings.width, 4 * settings.width, bias=settings.bias)
        self.down = nn.Linear(4 * settings.width, settings.width, bias=settings.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(F.gelu(self.up(x)))
        return output


class Block(nn.Module):
    """One layer, from (N, T, width) to the same."""

    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(settings.width, bias=settings.bias)
        self.attention = Attention(settings)
        self.mlp_norm = nn.LayerNorm(settings.width, bias=settings.bias)
        self.mlp = MLP(settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        output: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return output


class Head(nn.Linear):
    """The output layer."""

    def forward(self, x: torch.Tensor, judge: Judge | None = None) -> Any:
        """Logits, or what ``judge`` makes of the hidden states and the weight, without logits of all of them."""
        return super().forward(x) if judge is None else judge(x, self.weight)


class GPT(nn.Module):
    """Tokens (N, T) to logits (N, T, vocabulary), with T at most the context; or to what a ``judge`` makes of them.

    A stage of a pipeline keeps some of the blocks under their names, and has None in place of ``tokens``,
    ``positions``, ``norm`` and ``head`` where these are another stage's. It takes and gives (N, T, width) there.

    Attributes:
        gives_hidden: whether it gives (N, T, width) although it has a head, which the caller then calls.
    """

    gives_hidden = False

    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        self.tokens: nn.Embedding | None = nn.Embedding(settings.vocabulary, settings.width)
        self.positions: nn.Embedding | None = nn.Embedding(settings.context, settings.width)
        self.blocks = nn.ModuleDict({str(number): Block(settings) for number in range(settings.layers)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(settings.width, bias=settings.bias)
        self.head: Head | None = Head(settings.width, settings.vocabulary, bias=False)
        if settings.tied:
            self.head.weight = self.tokens.weight
        self._draw(settings.layers)

    def forward(self, x: torch.Tensor, judge: Judge | None = None) -> Any:
        if self.tokens is not None:
            x = self.tokens(x)
        if self.positions is not None:
            x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.head is None or self.gives_hidden else self.head(x, judge)

    @torch.no_grad()
    def _draw(self, layers: int) -> None:
        """N(0, 0.02), and biases 0.

        The deviation of the two layers of each block that add to the residual stream is divided by sqrt(2 layers), so
        that the sum over the layers keeps its size (model.py, lines 142 to 168).
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_DEVIATION)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks.values():
            assert isinstance(block, Block)
            for layer in (block.attention.output, block.mlp.down):
                nn.init.normal_(layer.weight, std=_DEVIATION / math.sqrt(2 * layers))

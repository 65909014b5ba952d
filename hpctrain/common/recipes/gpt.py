"""The size of a GPT: the keys of a recipe's model section, and what follows from them in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from hpctrain.common.recipes.keys import CheckedSection, Count, Of
from hpctrain.common.recipes.transformer import Transformer

_GPT = Of("name", "gpt")


class GptSettings(CheckedSection):
    """A decoder of the kind of GPT-2 (Radford et al. 2019); the defaults are nanoGPT's smallest."""

    layers: Annotated[Count, _GPT] = Field(12, description="blocks of attention and feed-forward layers")
    heads: Annotated[Count, _GPT] = Field(12, description="of each block's attention")
    width: Annotated[Count, _GPT] = Field(
        768, description="numbers per token between the blocks; four times as many inside"
    )
    context: Annotated[Count, _GPT] = Field(1024, description="tokens per sample")
    vocabulary: Annotated[Count, _GPT] = Field(50304, description="size of the vocabulary, at least that of the data")
    bias: Annotated[bool, _GPT] = Field(False, description="whether linear layers and normalisations have one")
    tied: Annotated[bool, _GPT] = Field(True, description="the output layer is the embedding of the tokens")

    def faults(self) -> Iterator[str]:
        if self.width % self.heads:
            yield f"width ({self.width}) is not a multiple of heads ({self.heads})"

    @property
    def transformer(self) -> Transformer:
        """The same sizes as predictions take them."""
        return Transformer(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            kv_heads=self.heads,
            mlp=4 * self.width,
            vocabulary=self.vocabulary,
            context=self.context,
            tied=self.tied,
            bias="all" if self.bias else "none",
        )

    @property
    def parameters(self) -> int:
        """The number of parameters; shared ones count once."""
        return self.transformer.parameters.total

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the forward and backward pass, without what activation checkpointing computes again.

        6 N + 12 L H Q T (Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B), where H Q is the width and N
        leaves out what is only looked up: the positions, as in nanoGPT's estimate_mfu (model.py, lines 150 to 160 and
        289 to 303), and the embedding where the output layer is another one.
        """
        looked_up = (self.context + (0 if self.tied else self.vocabulary)) * self.width
        return 6 * (self.parameters - looked_up) + 12 * self.layers * self.width * self.context


# Heads that 2, 4 and 8 ranks can divide, and most of its 11.4 million parameters in the blocks, as in large GPTs.
BENCHED = GptSettings(layers=6, heads=8, width=384, context=64, vocabulary=2048)
"""The network that ``hpctrain bench`` calls gpt."""

"""The size of a GPT: the keys of a recipe's model section, and what follows from them in closed form."""

from __future__ import annotations

from pydantic import Field, model_validator

from hpctrain.common.errors import InvalidValueError
from hpctrain.common.files.checked_yaml import Section
from hpctrain.common.recipes.bounds import Count
from hpctrain.common.recipes.transformer import Transformer


class GptSettings(Section):
    """A decoder of the kind of GPT-2 (Radford et al. 2019); the defaults are nanoGPT's smallest."""

    layers: Count = Field(12, description="for gpt: blocks of attention and feed-forward layers")
    heads: Count = Field(12, description="for gpt: of each block's attention")
    width: Count = Field(768, description="for gpt: numbers per token between the blocks; four times as many inside")
    context: Count = Field(1024, description="for gpt: tokens per sample")
    vocabulary: Count = Field(50304, description="for gpt: size of the vocabulary, at least that of the data")
    bias: bool = Field(False, description="for gpt: whether linear layers and normalisations have one")
    tied: bool = Field(True, description="for gpt: the output layer is the embedding of the tokens")

    @model_validator(mode="after")
    def _divides(self) -> GptSettings:
        if self.width % self.heads:
            raise InvalidValueError(
                "HT-model-not-divisible",
                "width ({width}) is not a multiple of heads ({heads})",
                width=self.width,
                heads=self.heads,
            )
        return self

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

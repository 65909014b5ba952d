"""The sizes of a transformer, and the number of its parameters, which follows from them in closed form."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, get_args

from hpctrain.common.errors import HpctrainError

Kind = Literal["gelu", "swiglu"]
Norm = Literal["layernorm", "rmsnorm"]
Positions = Literal["learned", "rotary", "none"]
Bias = Literal["all", "qkv", "none"]

CHOICES: dict[str, tuple[str, ...]] = {
    "kind": get_args(Kind),
    "norm": get_args(Norm),
    "positions": get_args(Positions),
    "bias": get_args(Bias),
}
# Larger than any that was trained; beyond it a typing error is more likely, and products stay exact in a float.
_LARGEST = 10**7
_MAY_BE_0 = ("head_width", "other_rows", "window")


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """How many parameters each part has; attention, MLP and norms are those of one layer.

    Attributes:
        transform: what BERT's head has ahead of the vocabulary: a linear layer, a norm and the biases of the logits.
        head: 0 where it is the embedding.
    """

    layers: int
    embedding: int
    positions: int
    attention: int
    mlp: int
    norms: int
    final_norm: int
    transform: int
    head: int

    @property
    def layer(self) -> int:
        """Those of one layer."""
        return self.attention + self.mlp + self.norms

    @property
    def first(self) -> int:
        """Those ahead of the layers, which the first stage of a pipeline has."""
        return self.embedding + self.positions

    @property
    def last(self) -> int:
        """Those behind the layers, without an embedding that is used once more."""
        return self.final_norm + self.transform + self.head

    @property
    def total(self) -> int:
        """Those of the whole network; shared ones count once."""
        return self.first + self.layers * self.layer + self.last


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A network of equal layers, each attention and an MLP with residual connections.

    Attributes:
        width: numbers a token between two layers.
        kv_heads: heads of keys and values; each serves ``heads / kv_heads`` queries (Ainslie et al. 2023, arXiv
            2305.13245).
        mlp: the inner width of the MLP.
        context: tokens of a sample, and rows of the learned positions.
        kind: ``gelu`` has two matrices, of which one widens and one narrows (ReLU counts as it); ``swiglu`` has a
            third, as a gate (Shazeer 2020, arXiv 2002.05202).
        bias: which linear layers have one; with ``all``, layer norms have one too.
        tied: the head is the embedding.
        causal: tokens attend to those before them; without it the network has BERT's head for masked words.
        head_width: numbers a head; 0 for width / heads.
        window: tokens that a causal token attends to at most, itself among them; 0 for all before it.
        head_norms: queries and keys are normalised head by head (Yang et al. 2025, arXiv 2505.09388, section 2).
        other_rows: rows of further tables that are looked up for each token: BERT's two types, OPT's two paddings.

    Raises:
        HpctrainError: sizes that do not fit each other.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    context: int
    kind: Kind = "gelu"
    norm: Norm = "layernorm"
    positions: Positions = "learned"
    tied: bool = True
    bias: Bias = "all"
    causal: bool = True
    head_width: int = 0
    window: int = 0
    head_norms: bool = False
    other_rows: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in CHOICES and value not in CHOICES[field.name]:
                raise HpctrainError(
                    "HT-choice-unknown",
                    "{key} is {value!r}",
                    f"valid: {', '.join(CHOICES[field.name])}",
                    key=field.name,
                    value=value,
                )
            least = 0 if field.name in _MAY_BE_0 else 1
            if field.type == "int" and not least <= value <= _LARGEST:
                raise HpctrainError(
                    "HT-key-out-of-range",
                    "{key} is {value}; it is at least {least} and at most {most}",
                    key=field.name,
                    value=value,
                    least=least,
                    most=_LARGEST,
                )
        if self.window and not self.causal:
            raise HpctrainError(
                "HT-transformer-not-valid",
                "window is {window}, and causal is false",
                "windows are of causal attention alone: leave one of both out",
                window=self.window,
            )
        for key, of in (("width", "heads"), ("heads", "kv_heads")):
            if getattr(self, key) % getattr(self, of) and not (key == "width" and self.head_width):
                raise HpctrainError(
                    "HT-model-not-divisible",
                    "{key} ({value}) is not a multiple of {of} ({parts})",
                    key=key,
                    value=getattr(self, key),
                    of=of,
                    parts=getattr(self, of),
                )

    @property
    def queries(self) -> int:
        """Numbers a token in all queries of a layer."""
        return self.heads * (self.head_width or self.width // self.heads)

    @property
    def keys(self) -> int:
        """Numbers a token in all keys of a layer, and as many in its values."""
        return self.queries // self.heads * self.kv_heads

    @property
    def matrices(self) -> int:
        """The MLP's matrices."""
        return 3 if self.kind == "swiglu" else 2

    def attended(self, sequence: int) -> float:
        """Tokens of a sample that one of them attends to in the mean."""
        if not self.causal:
            return sequence
        window = min(self.window or sequence, sequence)
        return window - window**2 / (2 * sequence)

    @cached_property
    def parameters(self) -> Parameters:
        """How many parameters there are."""
        biased, norm = self.bias == "all", self._norm
        linear = 2 * self.width * (self.queries + self.keys)
        qkv = self.queries + 2 * self.keys
        biases = (qkv if self.bias != "none" else 0) + (self.width if biased else 0)
        inner = (self.matrices - 1) * self.mlp + self.width if biased else 0
        return Parameters(
            layers=self.layers,
            embedding=self.vocabulary * self.width,
            positions=(self.other_rows + (self.context if self.positions == "learned" else 0)) * self.width,
            attention=linear + biases + (2 * self.queries // self.heads if self.head_norms else 0),
            mlp=self.matrices * self.width * self.mlp + inner,
            norms=2 * norm,
            # BERT normalises behind the embedding instead.
            final_norm=norm,
            transform=0 if self.causal else self.width**2 + self.width + norm + self.vocabulary,
            head=0 if self.tied else self.vocabulary * self.width,
        )

    @property
    def _norm(self) -> int:
        return self.width * (2 if self.norm == "layernorm" and self.bias == "all" else 1)

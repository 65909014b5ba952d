"""Transformers written out in plain PyTorch, against which closed forms are tested."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hpctrain.common.recipes.transformer import Transformer


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864) of (N, heads, T, head)."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angles = torch.arange(x.shape[-2], dtype=torch.float32, device=x.device)[:, None] * rates
    sine, cosine = (each.to(x.dtype) for each in (angles.sin(), angles.cos()))
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


class _RmsNorm(torch.autograd.Function):
    """RMSNorm that keeps its input and one number a token, as CUDA's kernel does; on CPUs PyTorch keeps several copies
    of the input.
    """

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rate = x.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        context.save_for_backward(x, weight, rate)
        return (x * rate).to(x.dtype) * weight

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, rate = context.saved_tensors
        scaled, weighted = x * rate, gradient * weight
        along = (weighted * scaled).mean(-1, keepdim=True)
        of_x = rate * (weighted - scaled * along)
        return of_x.to(x.dtype), (gradient * scaled).flatten(0, -2).sum(0).to(weight.dtype)


class RmsNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _RmsNorm.apply(x, self.weight)
        return found


def norm(sizes: Transformer) -> nn.Module:
    """The norm of such a network."""
    if sizes.norm == "rmsnorm":
        return RmsNorm(sizes.width)
    return nn.LayerNorm(sizes.width, bias=sizes.bias == "all")


class Attention(nn.Module):
    """Attention with fewer heads of keys and values, by flash or with its scores written out."""

    def __init__(self, sizes: Transformer, dropout: float, materialised: bool) -> None:
        super().__init__()
        self.sizes, self.dropout, self.materialised = sizes, dropout, materialised
        qkv = sizes.bias != "none"
        self.query = nn.Linear(sizes.width, sizes.queries, bias=qkv)
        self.key = nn.Linear(sizes.width, sizes.keys, bias=qkv)
        self.value = nn.Linear(sizes.width, sizes.keys, bias=qkv)
        self.output = nn.Linear(sizes.queries, sizes.width, bias=sizes.bias == "all")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head = self.sizes.queries // self.sizes.heads
        query, key, value = (
            layer(x).unflatten(-1, (-1, head)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        if self.sizes.positions == "rotary":
            query, key = rotated(query), rotated(key)
        if self.materialised:
            mixed = self._written_out(query, key, value)
        else:
            grouped = self.sizes.heads != self.sizes.kv_heads
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.sizes.causal, enable_gqa=grouped)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _written_out(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # The queries that share a head of keys are rows of one product, so that keys need not be repeated.
        shared = query.unflatten(1, (self.sizes.kv_heads, -1)).flatten(2, 3)
        scores = (shared / math.sqrt(query.shape[-1]) @ key.transpose(-1, -2)).view(*query.shape[:3], -1)
        if self.sizes.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        weights = F.dropout(scores.softmax(-1), self.dropout, training=self.dropout > 0)
        return (weights.view(*shared.shape[:3], -1) @ value).view(query.shape)


class MLP(nn.Module):
    """The feed-forward part of a layer."""

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        bias = sizes.bias == "all"
        self.up = nn.Linear(sizes.width, sizes.mlp, bias=bias)
        self.gate = nn.Linear(sizes.width, sizes.mlp, bias=bias) if sizes.kind == "swiglu" else None
        self.down = nn.Linear(sizes.mlp, sizes.width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(inner)


class Layer(nn.Module):
    """One layer; BERT's normalises behind each sum instead of ahead."""

    def __init__(self, sizes: Transformer, *, dropout: float = 0.0, materialised: bool = False) -> None:
        super().__init__()
        self.behind, self.dropout = not sizes.causal, dropout
        self.attention, self.mlp = Attention(sizes, dropout, materialised), MLP(sizes)
        self.attention_norm, self.mlp_norm = norm(sizes), norm(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part, normalise in ((self.attention, self.attention_norm), (self.mlp, self.mlp_norm)):
            added = F.dropout(part(x if self.behind else normalise(x)), self.dropout, training=self.dropout > 0)
            x = normalise(x + added) if self.behind else x + added
        return x


class Network(nn.Module):
    """Tokens (N, T) to logits (N, T, vocabulary)."""

    def __init__(self, sizes: Transformer, **settings: float) -> None:
        super().__init__()
        self.sizes = sizes
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        rows = sizes.other_rows + (sizes.context if sizes.positions == "learned" else 0)
        self.rows = nn.Embedding(rows, sizes.width) if rows else None
        self.layers = nn.ModuleList(Layer(sizes, **settings) for _ in range(sizes.layers))
        self.norm = norm(sizes)
        self.transform = None if sizes.causal else nn.Sequential(nn.Linear(sizes.width, sizes.width), norm(sizes))
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=not sizes.causal)
        if sizes.tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x)
        if self.rows is not None:
            x = x + self.rows(torch.arange(x.shape[1], device=x.device))
        if not self.sizes.causal:
            x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        if self.sizes.causal:
            x = self.norm(x)
        return self.head(x if self.transform is None else self.transform(x))

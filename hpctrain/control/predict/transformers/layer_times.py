"""How long one layer of a transformer computes on a rank, without the traffic between ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hpctrain.control.predict.transformers.rates import Software, System

if TYPE_CHECKING:
    from hpctrain.common.recipes.transformer import Transformer
    from hpctrain.control.predict.transformers.layout import Layout

# A tile of a matrix product's result on one multiprocessor (cuBLAS and CUTLASS choose 128 x 256 most often).
_TILE = 128 * 256
_MULTIPROCESSORS = 132
_CAST_BYTES = 4.0
# FLOPs of attention's backward pass for each of its forward pass: five products for two (Dao et al. 2022).
_FLASH_BACKWARD = 2.5


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Seconds of a pass of one layer, by cause."""

    matmul: float
    attention: float
    memory: float

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.memory


@dataclass(frozen=True)
class Layer:
    """One layer of a micro-batch on one rank."""

    network: Transformer
    layout: Layout
    system: System
    software: Software
    values: Mapping[str, float]
    sequence: int

    # Sizes.

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        return {str(axis): size for axis, size in self.layout.sizes.items()}

    @cached_property
    def tokens(self) -> float:
        """Of a micro-batch on a rank."""
        return self.layout.tokens(self.sequence)

    @cached_property
    def item(self) -> int:
        """Bytes of an element between layers."""
        return self.layout.item_bytes

    @cached_property
    def layer_parameters(self) -> float:
        """Of a layer on a rank along tp."""
        return self.layout.layer_parameters(self.network)

    @cached_property
    def stage_layers(self) -> list[int]:
        """Layers of each rank along pp."""
        return [self.layout.rank_layers(self.network, rank) for rank in range(self.sizes["pp"])]

    @cached_property
    def head_rank(self) -> int:
        """The rank along pp that has the head."""
        return 0 if self.layout.schedule == "zbv" else self.sizes["pp"] - 1

    @cached_property
    def rank_parameters(self) -> float:
        """Of the rank along pp that has most."""
        return max(self.layout.rank_parameters(self.network, rank) for rank in range(self.sizes["pp"]))

    # Rates.

    @cached_property
    def speed(self) -> float:
        """What a GPU's power leaves of its rate, and what else its kind differs by."""
        held_back: float = self.system.held_back ** self.values["power"]
        return self.values[f"gpu.{self.system.generation}"] * held_back

    @cached_property
    def wide_peak(self) -> float:
        """FLOP/s of the data sheet for what is not computed in 8 or 4 bits: attention and the head."""
        narrow = self.layout.precision in ("fp8", "fp4")
        return self.system.peak("bf16" if narrow else self.layout.precision)

    @cached_property
    def wide_rate(self) -> float:
        """FLOP/s of matrix products that are not in 8 or 4 bits."""
        return self.wide_peak * self.values["matmul"] * self.speed

    @cached_property
    def rate(self) -> float:
        """FLOP/s of the layers' matrix products."""
        precision = self.layout.precision
        if precision not in ("fp8", "fp4"):
            return self.wide_rate
        return self.system.peak(precision) * self.values["matmul"] * self.speed * self.values[precision]

    # One layer.

    def product(self, rows: float, columns: float, inner: float, rate: float) -> float:
        """Seconds of a matrix product: its FLOPs, a part of a wave of tiles, its bytes and its kernel."""
        wave = self.values["wave"] * _TILE * inner * _MULTIPROCESSORS / rate
        moved = 0.5 * 2 * (rows * inner + columns * inner + rows * columns) / self.system.memory_bytes_per_s
        return 2 * rows * columns * inner / rate + wave + moved + self.values["kernel"]

    def products(self, rows: float, columns: float, inner: float, rate: float) -> tuple[float, float]:
        """Of the forward pass, and of the backward pass: by the input and by the weights."""
        forward = self.product(rows, columns, inner, rate)
        return forward, self.product(rows, inner, columns, rate) + self.product(columns, inner, rows, rate)

    @cached_property
    def passes(self) -> tuple[Pass, Pass]:
        """The forward and the backward pass of one layer, without traffic."""
        network, tp = self.network, self.sizes["tp"]
        wide = network.mlp * (network.matrices - 1)
        keys = network.keys / min(tp, network.kv_heads)
        shapes = (
            (network.queries / tp + 2 * keys, network.width),
            (network.width, network.queries / tp),
            (wide / tp, network.width),
            (network.width, network.mlp / tp),
        )
        forward = backward = 0.0
        for columns, inner in shapes:
            one, two = self.products(self.tokens, columns, inner, self.rate)
            forward, backward = forward + one, backward + two
        if self.layout.precision in ("fp8", "fp4"):
            cast = self.values["cast"] * _CAST_BYTES / self.system.memory_bytes_per_s
            forward += cast * (self.tokens * sum(inner for _, inner in shapes) + self.layer_parameters)
            backward += cast * self.tokens * sum(columns for columns, _ in shapes)
        scores, scores_back = self.attention
        memory = self.memory
        return (
            Pass(matmul=forward, attention=scores, memory=memory),
            Pass(matmul=backward, attention=scores_back, memory=2 * memory),
        )

    @cached_property
    def attention(self) -> tuple[float, float]:
        """Seconds of scores and their product with values in either pass, of one layer."""
        network, values = self.network, self.values
        pairs = self.tokens * self.sequence / self.sizes["tp"]
        flops = 4 * pairs * network.queries
        if self.layout.attention == "materialised":
            scores = pairs * network.heads * values["score_bytes"] / self.system.memory_bytes_per_s
            forward = flops / (self.wide_rate / values["matmul"] * values["scores"]) + scores
            return forward, 2 * forward
        share = values[f"attention.{self.system.generation}"] * values[f"gpu.{self.system.generation}"]
        if self.software.cudnn_attention and self.system.generation == "hopper":
            share *= values["cudnn_attention"]
        width = network.queries // network.heads
        share *= values["narrow_heads"] ** min(1.0, max(0.0, math.log2(128 / width)))
        forward = flops * network.attended(self.sequence) / self.sequence / (self.wide_peak * share)
        return forward, _FLASH_BACKWARD * forward

    @cached_property
    def memory(self) -> float:
        """Seconds of what is bound by memory in a layer's forward pass: norms, residuals, rotation, activation."""
        network, tp = self.network, self.sizes["tp"]
        split = tp if self.layout.sequence_parallel else 1
        moved = (
            10 * network.width / split + 2 * (network.queries + network.keys) / tp + network.matrices * network.mlp / tp
        )
        if network.head_norms:
            moved += 2 * (network.queries + network.keys) / tp
        factor = self.values["memory"] * (self.values["eager"] if self.layout.kernels == "eager" else 1.0)
        return self.tokens * moved * self.item * factor / self.system.memory_bytes_per_s

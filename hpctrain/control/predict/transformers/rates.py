"""The rates of a system, by the constants of ``step.yaml``, and how long a layer of a transformer computes on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.common.cluster.gpu_models import Generation, GpuModel, Kind, buses, gpu
from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.files.checked_yaml import Section, load_shipped
from hpctrain.common.recipes.keys import Positive
from hpctrain.control.predict.measurements import interpolated
from hpctrain.control.predict.values import Constant
from hpctrain.control.predict.values import constants as general_constants

if TYPE_CHECKING:
    from hpctrain.common.recipes.mesh import Axis
    from hpctrain.common.recipes.transformer import Transformer
    from hpctrain.control.predict.transformers.layout import Layout

# A tile of a matrix product's result on one multiprocessor (cuBLAS and CUTLASS choose 128 x 256 most often).
_TILE = 128 * 256
_MULTIPROCESSORS = 132
_CAST_BYTES = 4.0
# FLOPs of attention's backward pass for each of its forward pass: five products for two (Dao et al. 2022).
_FLASH_BACKWARD = 2.5
# Watts a PFLOP/s (16 bit) above which a GPU is not held back by its power limit; an A100 has 1,282, an H100 708.
_UNLIMITED_POWER = 1000.0


class FittedConstant(Constant):
    """A constant as fitted to published runs.

    ``prior`` and ``spread`` (of the logarithm) are what it was expected to be, and ``source`` says where that is from.
    """

    prior: Positive
    unit: str = ""
    kind: Kind = "published"


class Software(Section):
    """What trains the transformer.

    Attributes:
        factor: its speed against the others; fitted where several publishers have it, else close to 1.
        like: the software whose factor it shares.
        launch: time until the kernels of a layer are launched, against PyTorch's operators one by one.
        overlaps: it reduces gradients during the backward pass.
        stages_apart: ranks of one stage are neighbours (Megatron-LM's order), instead of those of one pipeline.
        cudnn_attention: attention is cuDNN's, as in Transformer Engine.
    """

    factor: Positive = 1.0
    like: str | None = None
    launch: Positive
    overlaps: bool = True
    stages_apart: bool = False
    cudnn_attention: bool = False
    about: str


class _ConstantsFile(Section):
    constants: dict[str, FittedConstant]
    software: dict[str, Software]


@cache
def step_file() -> _ConstantsFile:
    """All of ``step.yaml``."""
    return load_shipped(Path(__file__).with_name("step.yaml"), _ConstantsFile)


@cache
def step_constants() -> Mapping[str, float]:
    """The constants' values by name; the factor of a software is ``software.NAME``."""
    found = {name: each.value for name, each in step_file().constants.items()}
    return found | factors({name: each.factor for name, each in step_file().software.items()})


def factors(known: Mapping[str, float]) -> dict[str, float]:
    """The factor of each software as ``software.NAME``: its own or its like's of those that are known, else 1."""
    return {f"software.{name}": known.get(each.like or name, 1.0) for name, each in step_file().software.items()}


def software_named(name: str) -> Software:
    """A software that is known."""
    known = step_file().software
    if name not in known:
        valid = nearest(name, sorted(known))
        raise HpctrainError("HT-choice-unknown", "no training software is known as {name}", valid, name=name)
    return known[name]


@dataclass(frozen=True, kw_only=True)
class System:
    """The GPUs and what joins them.

    Attributes:
        sheet: the GPU's data sheet.
        memory_bytes_per_s: that copies reach.
        bus: bytes of an all-reduce and its bus bandwidth between GPUs that are joined directly, rising.
        joined: GPUs that are joined directly: of a node, or of a rack.
        network_bytes_per_s: what a GPU can send to others that it is not joined with, in one direction.
        shares: what the traffic of each axis gets of that, where it is known which links it goes over.
    """

    name: str
    sheet: GpuModel
    memory_bytes_per_s: float
    bus: tuple[tuple[float, float], ...]
    joined: int
    network_bytes_per_s: float
    shares: Callable[[Layout], Mapping[Axis, float]] | None = None

    @classmethod
    def of(
        cls,
        name: str,
        *,
        gpus_per_node: int = 8,
        network_bytes_per_s: float,
        shares: Callable[[Layout], Mapping[Axis, float]] | None = None,
    ) -> System:
        """The system of a GPU by its data sheet, with the rate of the adapters of a node, divided by its GPUs."""
        sheet = gpu(name)
        return cls(
            name=name,
            sheet=sheet,
            memory_bytes_per_s=sheet.memory_bytes_per_s * general_constants()["memory_efficiency"].value,
            bus=buses()[sheet.bus].points,
            joined=max(gpus_per_node, sheet.rack),
            network_bytes_per_s=network_bytes_per_s,
            shares=shares,
        )

    @property
    def generation(self) -> Generation:
        """The GPU's, by which attention's kernels and clocks differ."""
        return self.sheet.generation

    @property
    def flops(self) -> dict[str, float]:
        """FLOP/s of matrix products by precision, for those that it has."""
        sheet = self.sheet
        rates = {"float32": sheet.vector_flops, "fp16": sheet.half_flops, "fp8": sheet.fp8_flops}
        rates |= {"fp4": sheet.fp4_flops, "bf16": sheet.half_flops if sheet.bfloat16 else None}
        return {precision: rate for precision, rate in rates.items() if rate is not None}

    def peak(self, precision: str) -> float:
        """FLOP/s of the data sheet."""
        if precision not in self.flops:
            valid = f"valid: {', '.join(self.flops)}"
            values: dict[str, Any] = {"gpu": self.name, "precision": precision}
            raise HpctrainError(
                "HT-prediction-not-possible", "{gpu} has no matrix products in {precision}", valid, **values
            )
        return self.flops[precision]

    def ring(
        self, share: float, size: int, stride: int, nbytes: float, values: Mapping[str, float]
    ) -> tuple[float, float]:
        """Bytes a second of a collective among ranks with a stride and a share of adapters, and its latency."""
        within = interpolated(self.bus, nbytes) * values["bus"]
        if size * stride <= self.joined:
            return within, values["local"]
        local = max(1, min(size, self.joined // stride))
        between = self.network_bytes_per_s * share * values["wire"] * local
        return min(within, between), values["local"] + values["hop"] * math.ceil(size / local)

    @property
    def held_back(self) -> float:
        """Watts a PFLOP/s, relative to those that no longer limit it; at most 1."""
        return min(1.0, self.sheet.power_w * 1e15 / self.sheet.half_flops / _UNLIMITED_POWER)


class Pass(NamedTuple):
    """Seconds of a pass of one layer, by cause."""

    matmul: float
    attention: float
    memory: float


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
    def sizes(self) -> Mapping[Axis, int]:
        return self.layout.sizes

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

    # Rates.

    @cached_property
    def speed(self) -> float:
        """What a GPU's power leaves of its rate, and what else its kind differs by."""
        held_back: float = self.system.held_back ** self.values["power"]
        return self.values[f"gpu.{self.system.generation}"] * held_back

    @cached_property
    def narrow(self) -> bool:
        """Whether the layers' matrix products are in 8 or 4 bits; attention and the head are not."""
        return self.layout.precision in ("fp8", "fp4")

    @cached_property
    def wide_peak(self) -> float:
        """FLOP/s of the data sheet for what is not computed in 8 or 4 bits."""
        return self.system.peak("bf16" if self.narrow else self.layout.precision)

    @cached_property
    def wide_rate(self) -> float:
        """FLOP/s of matrix products that are not in 8 or 4 bits."""
        return self.wide_peak * self.values["matmul"] * self.speed

    @cached_property
    def rate(self) -> float:
        """FLOP/s of the layers' matrix products."""
        precision = self.layout.precision
        if not self.narrow:
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
        if self.narrow:
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

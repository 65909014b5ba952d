"""The constants of a transformer's step (``step.yaml``), the software that trains, and the rates of a system."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.common.cluster.gpu_models import Generation, Kind, buses, gpu
from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.files.checked_yaml import Section, load_checked
from hpctrain.common.recipes.keys import Positive
from hpctrain.control.predict.constants import Constant
from hpctrain.control.predict.constants import constants as general_constants
from hpctrain.control.predict.measurements import interpolated

if TYPE_CHECKING:
    from hpctrain.common.recipes.mesh import Axis
    from hpctrain.control.predict.transformers.layout import Layout

# Watts a PFLOP/s (16 bit) above which a GPU is not held back by its power limit; an A100 has 1,282, an H100 708.
_UNLIMITED_POWER = 1000.0


class FittedConstant(Constant):
    """One constant.

    Attributes:
        value: as fitted to published runs; ``prior`` and ``spread`` (of the logarithm) are what it was expected to be.
        source: where the expectation is from.
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
    path = Path(__file__).with_name("step.yaml")
    return load_checked(
        path.read_text(encoding="utf-8"), path, _ConstantsFile, "file of constants", "reinstall hpctrain"
    )


@cache
def step_constants() -> Mapping[str, float]:
    """The constants' values by name; the factor of a software is ``software.NAME``."""
    found = {name: each.value for name, each in step_file().constants.items()}
    return found | factors({name: each.factor for name, each in step_file().software.items()})


def factors(known: Mapping[str, float]) -> dict[str, float]:
    """The factor of each software as ``software.NAME``: its own or its like's of those that are known, else 1."""
    return {f"software.{name}": known.get(each.like or name, 1.0) for name, each in step_file().software.items()}


def software_named(name: str) -> Software:
    """A software that is known.

    Raises:
        HpctrainError: it is not.
    """
    found = step_file().software.get(name)
    if found is None:
        raise HpctrainError(
            "HT-choice-unknown",
            "no training software is known as {name}",
            nearest(name, sorted(step_file().software)),
            name=name,
        )
    return found


@dataclass(frozen=True, kw_only=True)
class System:
    """The GPUs and what joins them.

    Attributes:
        name: of the GPU.
        generation: of the GPU, by which attention's kernels and clocks differ.
        flops: FLOP/s of matrix products by precision, for those that it has.
        memory_bytes_per_s: that copies reach.
        watts: the limit of its power.
        bus: bytes of an all-reduce and its bus bandwidth between GPUs that are joined directly, rising.
        joined: GPUs that are joined directly: of a node, or of a rack.
        network_bytes_per_s: what a GPU can send to others that it is not joined with, in one direction.
        shares: what the traffic of each axis gets of that, where it is known which links it goes over.
    """

    name: str
    generation: Generation
    flops: Mapping[str, float]
    memory_bytes_per_s: float
    watts: float
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
        """The system of a GPU by its data sheet.

        Args:
            network_bytes_per_s: of the adapters of a node, divided by its GPUs.

        Raises:
            HpctrainError: no such GPU is known.
        """
        sheet = gpu(name)
        flops = {
            "float32": sheet.vector_flops,
            "fp16": sheet.half_flops,
            "bf16": sheet.half_flops if sheet.bfloat16 else None,
            "fp8": sheet.fp8_flops,
            "fp4": sheet.fp4_flops,
        }
        return cls(
            name=name,
            generation=sheet.generation,
            flops={precision: rate for precision, rate in flops.items() if rate is not None},
            memory_bytes_per_s=sheet.memory_bytes_per_s * general_constants()["memory_efficiency"].value,
            watts=sheet.power_w,
            bus=buses()[sheet.bus].points,
            joined=max(gpus_per_node, sheet.rack),
            network_bytes_per_s=network_bytes_per_s,
            shares=shares,
        )

    def peak(self, precision: str) -> float:
        """FLOP/s of the data sheet.

        Raises:
            HpctrainError: it does not have the precision.
        """
        found = self.flops.get(precision)
        if found is None:
            raise HpctrainError(
                "HT-prediction-not-possible",
                "{gpu} has no matrix products in {precision}",
                f"valid: {', '.join(self.flops)}",
                gpu=self.name,
                precision=precision,
            )
        return found

    def ring(
        self, share: float, size: int, stride: int, nbytes: float, values: Mapping[str, float]
    ) -> tuple[float, float]:
        """Bytes a second of a collective among the ranks of an axis, which are some apart, and its latency.

        Args:
            share: of the adapters' rate that the axis gets.
        """
        within = self.bus_rate(nbytes) * values["bus"]
        if size * stride <= self.joined:
            return within, values["local"]
        local = max(1, min(size, self.joined // stride))
        between = self.network_bytes_per_s * share * values["wire"] * local
        return min(within, between), values["local"] + values["hop"] * math.ceil(size / local)

    @property
    def held_back(self) -> float:
        """Watts a PFLOP/s, relative to those that no longer limit it; at most 1."""
        peak = self.flops["fp16"]
        return min(1.0, self.watts * 1e15 / peak / _UNLIMITED_POWER)

    def bus_rate(self, nbytes: float) -> float:
        """The bus bandwidth of a collective of a size, interpolated between the sizes that were measured."""
        return interpolated(self.bus, nbytes)

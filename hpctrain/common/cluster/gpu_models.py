"""All facts about GPUs (``gpus.yaml``): their data sheets, their generation, and the buses that join them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.files.checked_yaml import Section, load_shipped

_OF_A_HOST = 8

Rate = Annotated[float, Field(gt=0)]
Kind = Literal["measured", "published", "assumed"]
Generation = Literal["pascal", "volta", "ampere", "ada", "hopper", "blackwell", "cdna"]


class Pace(Section):
    """The factor on the roofline of a GPU for what its data sheet does not say; ``spread`` is of its logarithm."""

    value: Rate
    spread: Rate
    kind: Kind
    source: str


class GpuModel(Section):
    """A GPU, whose entry has to state each field. Rates in FLOP/s and bytes/s, power in W."""

    reported_as: str
    generation: Generation
    vector_flops: Rate
    conv32_flops: Rate
    half_flops: Rate
    bfloat16: bool
    fp8_flops: Rate | None
    fp4_flops: Rate | None
    memory_bytes_per_s: Rate
    memory_mib: int
    power_w: Rate
    idle_w: Rate
    bus: str
    joined: int
    pace: Pace
    source: str

    @property
    def memory_bytes(self) -> int:
        """Its memory in bytes."""
        return self.memory_mib << 20

    @property
    def rack(self) -> int:
        """The number of GPUs on several hosts that NVLink joins; 1 where it joins those of one host only."""
        return self.joined if self.joined > _OF_A_HOST else 1


class Bus(Section):
    """The bus that joins the GPUs of one node."""

    points: tuple[tuple[Rate, Rate], ...] = Field(
        min_length=1, description="bytes of an all-reduce and its bus bandwidth in bytes/s, rising"
    )
    of: int = Field(ge=2, description="the GPUs that it was measured with")
    spread: float = Field(ge=0)
    kind: Kind
    source: str


class _Gpus(Section):
    gpus: dict[str, GpuModel]
    buses: dict[str, Bus]


@cache
def _file() -> _Gpus:
    return load_shipped(Path(__file__).with_name("gpus.yaml"), _Gpus)


def gpus() -> dict[str, GpuModel]:
    """All GPUs that are known, by the names of ``--gpu``."""
    return _file().gpus


def buses() -> dict[str, Bus]:
    """The buses that join the GPUs of a node, by name."""
    return _file().buses


def gpu(name: str) -> GpuModel:
    """The data sheet of one GPU."""
    found = gpus().get(name)
    if found is None:
        raise HpctrainError(
            "HT-choice-unknown", "--gpu {name}: no such GPU is known", nearest(name, sorted(gpus())), name=name
        )
    return found


def gpu_reported_as(name: str) -> str | None:
    """The GPU that a driver calls by a name such as ``NVIDIA A100-SXM4-80GB``; None for one that is not known."""
    return next((known for known, each in gpus().items() if re.search(rf"\b{each.reported_as}$", name)), None)


def matmul_flops(reported: str | None, precision: Literal["float32", "bf16", "fp16"]) -> float | None:
    """FLOP/s of matrix products as PyTorch does them by default, without TF32; None for a GPU that is not known.

    Args:
        reported: what its driver calls the GPU; None for a processor.
    """
    name = reported and gpu_reported_as(reported)
    if not name:
        return None
    known = gpu(name)
    narrow = precision == "fp16" or (precision == "bf16" and known.bfloat16)
    return known.half_flops if narrow else known.vector_flops

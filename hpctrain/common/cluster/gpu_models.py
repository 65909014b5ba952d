"""GPUs as their makers' data sheets describe them (``gpus.yaml``)."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.files.checked_yaml import Section, load_checked

_OF_A_HOST = 8

Rate = Annotated[float, Field(gt=0)]


class GpuModel(Section):
    """What a data sheet states. Rates in FLOP/s and bytes/s, power in W."""

    reported_as: str
    vector_flops: Rate
    conv32_flops: Rate
    half_flops: Rate
    fp8_flops: Rate | None = None
    fp4_flops: Rate | None = None
    memory_bytes_per_s: Rate
    memory_mib: int
    power_w: Rate
    idle_w: Rate
    bus: str
    joined: int = _OF_A_HOST
    bfloat16: bool = True
    source: str

    @property
    def memory_bytes(self) -> int:
        """Its memory in bytes."""
        return self.memory_mib << 20

    @property
    def rack(self) -> int:
        """The number of GPUs on several hosts that NVLink joins; 1 where it joins those of one host only."""
        return self.joined if self.joined > _OF_A_HOST else 1


class _Gpus(Section):
    gpus: dict[str, GpuModel]


@cache
def gpus() -> dict[str, GpuModel]:
    """All GPUs that are known, by the names of ``--gpu``."""
    path = Path(__file__).parent / "gpus.yaml"
    text = path.read_text(encoding="utf-8")
    return dict(load_checked(text, path, _Gpus, "file of data sheets", "reinstall hpctrain").gpus)


def gpu(name: str) -> GpuModel:
    """The data sheet of one GPU.

    Raises:
        HpctrainError: there is none of this name.
    """
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

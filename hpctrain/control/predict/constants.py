"""The constants of a prediction: each with its value, its spread and where it is from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from hpctrain.common.cluster.gpu_models import GpuModel, Kind, buses, gpus
from hpctrain.common.files.checked_yaml import Section, load_checked
from hpctrain.common.recipes.keys import NotNegative, Positive

# Data sheets round, and boards run at other clocks than they state.
_DATA_SHEET_SPREAD = 0.02


class Constant(Section):
    """One figure that predictions depend on."""

    value: Positive
    unit: str
    spread: NotNegative = Field(description="standard deviation of its logarithm")
    kind: Kind
    source: str


class _Constants(Section):
    constants: dict[str, Constant]


@cache
def constants() -> dict[str, Constant]:
    """All constants by name. A GPU's are called ``GPU.FIELD``, and the largest rate of a bus ``bus.NAME``."""
    found = dict(_load().constants)
    for name, each in gpus().items():
        found |= {f"{name}.{key}": value for key, value in _of_gpu(each).items()}
        found[f"{name}.pace"] = Constant(unit="", **each.pace.model_dump())
    for name, bus in buses().items():
        found[f"bus.{name}"] = Constant(
            value=bus.points[-1][1], unit="B/s", spread=bus.spread, kind=bus.kind, source=bus.source
        )
    return found


def _of_gpu(each: GpuModel) -> Mapping[str, Constant]:
    units = {"vector_flops": "FLOP/s", "conv32_flops": "FLOP/s", "half_flops": "FLOP/s", "memory_bytes_per_s": "B/s"}
    sheet: dict[str, Any] = {"spread": _DATA_SHEET_SPREAD, "kind": "published", "source": each.source}
    found = {key: Constant(value=getattr(each, key), unit=unit, **sheet) for key, unit in units.items()}
    found["power_w"] = Constant(value=each.power_w, unit="W", **sheet)
    found["idle_w"] = Constant(value=each.idle_w, unit="W", spread=0.2, kind="assumed", source="an idle board")
    return found


def _load() -> _Constants:
    path = Path(__file__).with_name("constants.yaml")
    return load_checked(path.read_text(encoding="utf-8"), path, _Constants, "file of constants", "reinstall hpctrain")

"""The constants of a prediction in many draws at once, so that every figure gets an interval, and what makes it wide.

Column 0 of every array has the constants' own values; the others are draws from their spreads.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from pydantic import Field

from hpctrain.common.cluster.gpu_models import GpuModel, Kind, buses, gpus
from hpctrain.common.files.checked_yaml import Section, load_shipped
from hpctrain.common.recipes.keys import NotNegative, Positive
from hpctrain.control.topology.fabric import Floats

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
    found = dict(load_shipped(Path(__file__).with_name("constants.yaml"), _Constants).constants)
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


DRAWS = 400
# The quantiles between which 80 % of the draws are.
LOW, HIGH = 0.1, 0.9


@dataclass(frozen=True, kw_only=True)
class Values:
    """The value of each constant in each column.

    Attributes:
        logs: of some constants, the logarithm of what their value is multiplied with, (columns,).
        used: the names that were read so far.
    """

    constants: Mapping[str, Constant]
    columns: int
    logs: Mapping[str, Floats]
    used: set[str] = field(default_factory=set)

    def __getitem__(self, name: str) -> Floats:
        """The constant in each column, (columns,)."""
        self.used.add(name)
        value = np.full(self.columns, self.constants[name].value)
        return value * np.exp(self.logs[name]) if name in self.logs else value

    def log_factor(self, name: str) -> Floats:
        """The logarithm of what a constant is multiplied with, (columns,)."""
        self.used.add(name)
        return self.logs.get(name, np.zeros(self.columns))


def drawn(constants: Mapping[str, Constant], *, count: int = DRAWS) -> Values:
    """Column 0 and ``count`` draws, of a constant the same in every prediction, so that predictions can be compared."""
    logs = {name: _draws(name, each.spread, count) for name, each in constants.items()}
    return Values(constants=constants, columns=count + 1, logs=logs)


def _draws(name: str, spread: float, count: int) -> Floats:
    found = np.zeros(count + 1)
    if spread:
        found[1:] = spread * np.random.default_rng([0, zlib.crc32(name.encode())]).standard_normal(count)
    return found


@cache
def evenly_drawn(columns: int) -> Floats:
    """Zero, and normal draws at equal steps of probability, -1 at the quantile :data:`LOW` and 1 at :data:`HIGH`."""
    count = columns - 1
    draws = np.array([NormalDist().inv_cdf((rank + 0.5) / count) for rank in range(count)])
    found = np.zeros(columns)
    found[1:] = np.random.default_rng(0).permutation(draws / np.quantile(draws, HIGH))
    return found


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure with its 80 % interval."""

    value: float
    low: float
    high: float


def estimate(columns: Floats) -> Estimate:
    """The figure of column 0, and the interval of the draws in the others."""
    low, high = np.quantile(columns[1:], [LOW, HIGH]) if len(columns) > 1 else (columns[0], columns[0])
    value = float(columns[0])
    return Estimate(value=value, low=min(float(low), value), high=max(float(high), value))


@dataclass(frozen=True, kw_only=True)
class Cause:
    """How much of the variance of a step's logarithm comes from one constant.

    ``step`` is by how much of a step's time one standard deviation of the constant moves it.
    """

    name: str
    share: float
    step: float


def causes_by_size(moves: Mapping[str, float]) -> tuple[Cause, ...]:
    """The causes, the largest first, by how much one standard deviation of each moves a step's logarithm."""
    whole = max(sum(move**2 for move in moves.values()), 1e-30)
    ordered = sorted(moves.items(), key=lambda item: -(item[1] ** 2))
    return tuple(Cause(name=name, share=move**2 / whole, step=abs(move)) for name, move in ordered)


def causes_of(values: Values, total: Floats) -> tuple[Cause, ...]:
    """The effect of each constant on the step's time, by a regression of its logarithm on theirs."""
    names = [name for name in sorted(values.used) if name in values.logs and values.logs[name][1:].std() > 0]
    drawn_logs = np.stack([values.logs[name][1:] for name in names])
    centred = drawn_logs - drawn_logs.mean(axis=1, keepdims=True)
    log_total = np.log(total[1:]) - np.log(total[1:]).mean()
    # Ridge regression, because fitted constants are correlated and there are nearly a hundred of them.
    scaled = centred / centred.std(axis=1, keepdims=True)
    slopes = np.linalg.solve(scaled @ scaled.T + np.eye(len(names)), scaled @ log_total)
    return causes_by_size(dict(zip(names, slopes.tolist(), strict=True)))

"""The values of constants in many draws at once, so that every figure gets an interval.

Column 0 of every array has the constants' own values; the others are draws from their spreads, or, for a fit, the
value with one constant moved a little.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist

import numpy as np

from hpctrain.control.predict.constants import Constant
from hpctrain.control.topology.fabric import Floats

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

    def between(self, name: str, low: float, middle: float, high: float) -> Floats:
        """A figure that is anywhere in a range, (columns,): the constant's draws as places in it.

        Args:
            name: of a constant whose spread is 1.
            middle: the value of the figure in column 0.
        """
        place = np.clip(self.log_factor(name), -2.0, 2.0) / 2.0
        found: Floats = middle + np.where(place > 0, (high - middle) * place, (middle - low) * place)
        return found


def drawn(
    constants: Mapping[str, Constant], *, fitted: Mapping[str, Floats] | None = None, count: int = DRAWS
) -> Values:
    """Column 0 and ``count`` draws.

    A constant is drawn alike in every prediction, so that predictions can be compared.

    Args:
        fitted: columns of those constants that a calibration has narrowed, in place of their own spread.
    """
    logs = {name: _draws(name, each.spread, count) for name, each in constants.items()}
    return Values(constants=constants, columns=count + 1, logs={**logs, **(fitted or {})})


def perturbed(constants: Mapping[str, Constant], names: Sequence[str], at: Floats, by: float) -> Values:
    """Column 0 with the named constants multiplied by exp(``at``), and one column for each with it moved further."""
    shifts = np.tile(at[:, None], len(names) + 1)
    shifts[np.arange(len(names)), np.arange(1, len(names) + 1)] += by
    return Values(constants=constants, columns=len(names) + 1, logs=dict(zip(names, shifts, strict=True)))


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

    def __post_init__(self) -> None:
        assert self.low <= self.high


def estimate(columns: Floats) -> Estimate:
    """The figure of column 0, and the interval of the draws in the others."""
    low, high = np.quantile(columns[1:], [LOW, HIGH]) if len(columns) > 1 else (columns[0], columns[0])
    value = float(columns[0])
    return Estimate(value=value, low=min(float(low), value), high=max(float(high), value))

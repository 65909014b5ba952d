"""How wide the range of a transformer's step is: by what runs of others leave open, and by what is not stated.

Three things add up as variances of the logarithm: how far each constant of a step may be off and what that moves; the
kinds of this training of which few or no publishers have published runs; and the columns that are not stated, each by
what completing it has cost on runs where it was known. A multiple of their root holds 80 % of the runs of publishers
that were left out, each without a third of its columns (conformal prediction, Vovk et al. 2005, with scores by
difficulty as in Papadopoulos et al. 2011). benchmarks/transformer_ranges.py makes the figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from hpctrain.common.files.checked_yaml import Section, load_shipped
from hpctrain.common.recipes.keys import NotNegative, Positive
from hpctrain.control.predict.transformers.rates import step_constants, step_file
from hpctrain.control.predict.transformers.step import Setup

# By which a constant is moved for the slope of a step's logarithm.
_DIFFERENCE = 0.03


class Ranges(Section):
    """What ranges are made of (``ranges.yaml``).

    Attributes:
        quantile: multiple of the spread that holds 80 % of the runs of publishers that were left out.
        margin: factor on the width, because terms and expectations were chosen with these runs in sight.
        least: spread of any run.
        rare: spread where no publisher has published a run of a kind; n publishers leave 1 / (n + 1) of it.
        publishers: by kind and its value, how many publishers have published runs.
        columns: spread by a column that is not stated.
    """

    quantile: Positive
    margin: Positive
    least: Positive
    rare: Positive
    publishers: dict[str, dict[str, int]]
    columns: dict[str, NotNegative]

    def doubts(self, kinds: Mapping[str, str], unstated: Sequence[str]) -> dict[str, float]:
        """Spreads by what is rare and what is not stated."""
        found = {"publishers.any": self.least}
        found |= {f"publishers.{kind}": self.rare / (1 + self.count(kind, value)) for kind, value in kinds.items()}
        return found | {f"unstated.{column}": self.columns.get(column, 0.0) for column in unstated}

    def count(self, kind: str, value: str) -> int:
        """How many publishers have published runs with this value of a kind."""
        return self.publishers.get(kind, {}).get(value, 0)

    def half_width(self, spreads: Mapping[str, float]) -> float:
        """Half the width of the logarithm's range."""
        return self.quantile * self.margin * math.sqrt(sum(spread**2 for spread in spreads.values()))


@cache
def shipped_ranges() -> Ranges:
    """Those of ``ranges.yaml``."""
    return load_shipped(Path(__file__).with_name("ranges.yaml"), Ranges)


def step_spreads(setup: Setup, unstated: Sequence[str] = ()) -> dict[str, float]:
    """Spreads of the logarithm of a step by cause: a constant's name, ``publishers.KIND`` or ``unstated.COLUMN``.

    Args:
        unstated: columns of ``ranges.yaml`` that were completed.
    """
    spreads = constant_spreads(setup) | shipped_ranges().doubts(setup.kinds, unstated)
    if "network" in unstated:
        spreads["unstated.network"] = network_spread(setup)
    return spreads


def constant_spreads(setup: Setup) -> dict[str, float]:
    """How much each constant's own spread moves the logarithm of a step, for those that matter."""
    values = ReadConstants(step_constants())
    before, found = setup.predicted(values).seconds, {}
    for name, constant in step_file().constants.items():
        if constant.spread and name in values.names:
            moved = setup.predicted({**values, name: values[name] * math.exp(_DIFFERENCE)}).seconds
            found[name] = constant.spread * abs(math.log(moved / before)) / _DIFFERENCE
    return found


def network_spread(setup: Setup) -> float:
    """The spread of a step where adapters are not known: half of what a quarter of the usual rate does.

    Nodes are sold with the rate that is assumed, and with down to a quarter of it: of A100s with eight adapters of 200
    Gbit/s, and in clouds with four of 100.
    """
    slow = replace(setup.system, network_bytes_per_s=setup.system.network_bytes_per_s / 4)
    return abs(math.log(replace(setup, system=slow).step.seconds / setup.step.seconds)) / 2


class ReadConstants(dict[str, float]):
    """Constants that remember which of them were read."""

    def __init__(self, values: Mapping[str, float]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> float:
        self.names.add(name)
        return super().__getitem__(name)

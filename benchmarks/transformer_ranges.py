"""The ranges of published runs of transformers: their difficulty, and what a column that is not stated costs.

A range is wider where fewer publishers have published runs like it, and where more of a row is completed. What
completing a column costs is measured: a third of the columns of each run is removed at random, the row is completed,
and the change of its prediction is put down to the columns that were missing (least squares of squared changes, none of
them negative). The quantile is that of these incomplete rows, so that ranges hold for them too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformer_runs import NotExpressedError, Run, read_row

from hpctrain.common.errors import HpctrainError
from hpctrain.control.predict.transformers.ranges import Ranges, constant_spreads, network_spread, shipped_ranges
from hpctrain.control.topology.fabric import Floats

# What a publisher may leave out. Without the others a row cannot be predicted.
COLUMNS = (
    "heads", "kv_heads", "ffn", "mlp", "vocab", "seq_len", "gpus_per_node", "network", "dtype", "dp", "dp_replicate",
    "dp_shard", "zero_stage", "tp", "seq_par", "pp", "cp", "vp", "pp_schedule", "micro_batch", "global_batch",
    "grad_accum", "act_ckpt", "compile", "framework",
)  # fmt: skip
REMOVED = 1 / 3
# Times that each run loses columns.
_TIMES = 3
# Before the quantile: the spread of any run, and where nobody else has a run of a kind; powers of two within which
# sizes are alike; and by how much a column's spread is more than its root mean square, as changes are rare and large.
_LEAST, _RARE, _NEAR, _TAIL = 0.15, 0.3, 2, 2.0
# Of 410 runs that nobody had seen, ranges that held in 84 % of the runs that were left out held in 50 %: most of that
# was columns that were not stated, and this is for the rest. It is assumed.
_MARGIN = 1.25
_SIZES = ("gpus", "parameters", "micro_batch")
# Of the runs of publishers that were left out: 80 %, and by how many publishers there are a little more, because a new
# one is one more (Lee, Barber and Willett 2023, arXiv 2306.06342, hierarchical conformal prediction).
_CENTRAL = 0.8
_LARGEST_CHANGE = 1.0


@dataclass(frozen=True, kw_only=True)
class Incomplete:
    """A run whose row has lost columns.

    Attributes:
        columns: that were completed besides those of the whole row.
        change: of the logarithm of its prediction.
    """

    run: Run
    columns: tuple[str, ...]
    change: float


def incomplete(runs: Sequence[Run]) -> list[Incomplete]:
    """Each run several times, each time without a third of its columns, as far as it is predicted without them."""
    dice, found = np.random.default_rng(0), []
    for run in runs:
        for _ in range(_TIMES):
            kept = {column: "" for column in COLUMNS if dice.random() < REMOVED}
            try:
                other = read_row({**run.row, **kept})
            except (NotExpressedError, HpctrainError):
                continue
            change = math.log(other.tokens_per_s() / run.tokens_per_s())
            columns = tuple(sorted(set(other.guessed) - set(run.guessed)))
            found.append(Incomplete(run=replace(other, measured=run.measured), columns=columns, change=change))
    return found


def column_costs(rows: Sequence[Incomplete]) -> dict[str, float]:
    """The spread by each column, whose squares add up to the squared changes."""
    names = sorted({column for row in rows for column in row.columns})
    if not names:
        return {}
    weights = np.sqrt(family_weights([row.run for row in rows]))
    missing = np.array([[name in row.columns for name in names] for row in rows], float) * weights[:, None]
    squares = np.minimum(np.array([row.change for row in rows]) ** 2, _LARGEST_CHANGE) * weights
    found = np.zeros(len(names))
    products, aims = missing.T @ missing, missing.T @ squares
    for _ in range(200):
        for index in range(len(names)):
            others = products[index] @ found - products[index, index] * found[index]
            found[index] = max(0.0, (aims[index] - others) / max(products[index, index], 1e-12))
    return {name: round(_TAIL * math.sqrt(square), 3) for name, square in zip(names, found, strict=True)}


def family_weights(runs: Sequence[Run]) -> Floats:
    """Of each run, so that a family counts by the root of its size."""
    sizes: dict[str, int] = defaultdict(int)
    for run in runs:
        sizes[run.family] += 1
    return np.array([sizes[run.family] ** -0.5 for run in runs])


# The squares of what its constants, and a network that is not known, make of a training's spread: tables have many runs
# of few trainings.
_OF_CONSTANTS: dict[tuple[object, ...], tuple[float, float]] = {}


def spread_of(run: Run, ranges: Ranges) -> float:
    """The spread of a run before the quantile."""
    if run.training not in _OF_CONSTANTS:
        spreads = constant_spreads(run.setup)
        _OF_CONSTANTS[run.training] = (
            sum(spread**2 for spread in spreads.values()),
            network_spread(run.setup) ** 2,
        )
    of_constants, of_network = _OF_CONSTANTS[run.training]
    doubts = ranges.doubts(run.setup.kinds, run.guessed)
    whole = of_constants + sum(spread**2 for spread in doubts.values())
    return math.sqrt(whole + (of_network if "network" in run.guessed else 0.0))


def counted(runs: Iterable[Run]) -> dict[str, dict[str, int]]:
    """How many families have runs of each kind; of sizes, up to four times as small or large."""
    families: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    # Measured on one H100, see step.yaml.
    families["software"] = defaultdict(set, {"hpctrain": {"hpctrain"}, "hpctrain-compiled": {"hpctrain"}})
    for run in runs:
        for kind, value in run.setup.kinds.items():
            near = range(int(value) - _NEAR, int(value) + _NEAR + 1) if kind in _SIZES else (value,)
            for each in near:
                families[kind][str(each)].add(run.family)
    return {kind: {value: len(who) for value, who in values.items()} for kind, values in families.items()}


def made(runs: Sequence[Run], off: Sequence[float], rows: Sequence[Incomplete]) -> Ranges:
    """The ranges by some families' runs.

    Args:
        off: the logarithm of each incomplete row's prediction, by the other families, over what was measured.
        rows: the runs with columns removed; where there are none, the shipped ranges count.
    """
    if not rows:
        return shipped_ranges()
    families = sorted({run.family for run in runs})
    columns = column_costs(rows)
    others = {family: [run for run in runs if run.family != family] for family in families}
    known = {family: _ranges(counted(rest), columns, quantile=1) for family, rest in others.items()}
    spreads = np.array([spread_of(row.run, known[row.run.family]) for row in rows])
    scores, weights = np.abs(off) / spreads, family_weights([row.run for row in rows])
    order = np.argsort(scores)
    reached = np.cumsum(weights[order]) / weights.sum()
    wanted = min(1.0, _CENTRAL * (1 + 1 / len(families)))
    quantile = float(scores[order][min(int(np.searchsorted(reached, wanted)), len(order) - 1)])
    return _ranges(counted(runs), columns, quantile=round(quantile, 3))


def _ranges(publishers: dict[str, dict[str, int]], columns: dict[str, float], *, quantile: float) -> Ranges:
    return Ranges(quantile=quantile, margin=_MARGIN, least=_LEAST, rare=_RARE, publishers=publishers, columns=columns)

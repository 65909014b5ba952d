"""A prediction as a table, as JSON, and as notes about what it rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import TYPE_CHECKING, Any

from hpctrain.common.recipes.mesh import AXES
from hpctrain.control.predict.prediction import nodes_text
from hpctrain.report.output import table

if TYPE_CHECKING:
    from rich.table import Table

    from hpctrain.control.predict.prediction import Prediction, Row
    from hpctrain.control.predict.values import Cause, Estimate

# ``--explain`` lists this many constants, as far as each causes at least this share of the variance.
_EXPLAINED, _LEAST_SHARE = 8, 0.001
# A space at which no line breaks.
_NARROW = "\N{NARROW NO-BREAK SPACE}"
# Where the search for the largest batch ends.
_ANY_BATCH = 1 << 20
# From here on a step is told in seconds.
_LONG_STEP_S = 10.0
# Of a search, the table shows this many meshes.
_SHOWN = 10
# The terms of a step in words.
TERMS = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory": "memory traffic",
    "recomputation": "computing again",
    "tensor": "traffic along tp",
    "context": "traffic along cp",
    "launch": "starting kernels",
    "sharding": "gathering parameters",
    "head": "logits and loss",
    "pipeline": "traffic along pp",
    "bubble": "waiting of stages",
    "replicas": "reducing gradients",
    "update": "the optimizer",
    "step": "what is once a step",
    "stragglers": "slower ranks",
}


def prediction_record(prediction: Prediction) -> dict[str, Any]:
    """What ``predict --json`` prints: the row's figures where there is one, and all ``rows``."""
    rows = [row_record(row) for row in prediction.rows]
    first = rows[0] if len(rows) == 1 else {}
    return {
        **first,
        "recipe": prediction.name,
        "gpu": prediction.node.gpu,
        "engine": prediction.node.engine,
        "rows": rows,
        **({"candidates": [row_record(row) for row in prediction.candidates]} if prediction.candidates else {}),
        "constants": [
            {"name": name, "value": each.value, "unit": each.unit, "spread": each.spread}
            | {"source": each.source, "kind": each.kind}
            for name, each in prediction.constants.items()
        ],
        "causes": [asdict(cause) for cause in prediction.causes],
        "warnings": [*prediction.warnings, *memory_warnings(prediction)],
    }


def row_record(row: Row) -> dict[str, Any]:
    """The figures of one number of nodes; a figure that is not known is None."""
    of_text = ("tokens_per_s", "layout", "step_terms", "memory_terms", "limited_by")
    found = asdict(row)
    return {key: value for key, value in found.items() if row.tokens_per_s or key not in of_text}


def prediction_table(prediction: Prediction) -> Table:
    """One line for each number of nodes."""
    title = f"{prediction.name} on {prediction.node.gpu}, {prediction.node.local} a node, {prediction.node.engine}"
    # A batch per rank that is the same in all rows goes into the title.
    several = len({row.batch_per_gpu for row in prediction.rows}) > 1
    title += "" if several else f", {prediction.rows[0].batch_per_gpu:.4g} samples a rank"
    caption = f"efficiency against {yardstick(prediction)}; waits for reductions; ranges cover 80 % of the cases"
    of_text = prediction.rows[0].tokens_per_s is not None
    timed = prediction.rows[0].minutes is not None
    energies = [row.kwh for row in prediction.rows if row.kwh and row.minutes]
    unit, units = _energy_unit(energies)
    columns = ["nodes", *["batch"] * several, "step", "tokens/s" if of_text else "samples/s", "effic.", "waits"]
    columns += ["time"] * timed + [unit] * bool(energies) + ["memory"]
    rows = [_cells(row, units, several=several) for row in prediction.rows]
    return table(columns, rows, title=title, caption=caption, gap=1)


def _cells(row: Row, energy_units: float, *, several: bool) -> list[str]:
    """A row of the table; ranges stand on a second line."""
    step_s = row.step_s
    cells = [str(row.nodes), *[f"{row.batch_per_gpu:.4g}"] * several]
    cells += [
        _range(step_s, 1, "s") if step_s.value >= _LONG_STEP_S else _range(step_s, 1e3, "ms"),
        _range(row.tokens_per_s or row.samples_per_s, 1, ""),
        _range(row.efficiency, 100, "%"),
        _range(row.communication_share, 100, "%"),
    ]
    cells += [duration_range(row.minutes)] if row.minutes else []
    cells += [_range(row.kwh, energy_units, "")] if row.kwh and row.minutes else []
    return [*(cell.replace(" ", "\n", 1) for cell in cells), f"{row.memory_bytes.value / 1e9:.3g}{_NARROW}GB"]


def yardstick(prediction: Prediction) -> str:
    """What efficiency is against: a mesh may not fit into one node."""
    first = prediction.rows[0]
    whole = first.tokens_per_s is not None and first.nodes > 1 and first.efficiency.value == 1
    return f"{first.nodes} nodes" if whole else "one node"


def candidate_table(prediction: Prediction) -> Table:
    """The fastest meshes of a search."""
    cells = []
    for row in prediction.candidates[:_SHOWN]:
        assert row.layout is not None and row.tokens_per_s is not None
        cells.append(
            (
                mesh_text(row.layout),
                f"{row.layout['micro_batches']} of {row.layout['micro_batch']}",
                row.layout["recomputation"],
                _range(row.tokens_per_s, 1, "").replace(" ", "\n", 1),
                f"{row.memory_bytes.value / 1e9:.3g}{_NARROW}GB",
                TERMS.get(row.limited_by or "", row.limited_by or ""),
            )
        )
    columns = ("mesh", "micro-batches", "again", "tokens/s", "memory", "limited by")
    title = f"the fastest of the meshes that fit {prediction.rows[-1].gpus} GPUs"
    return table(columns, cells, title=title, left={*columns} - {"tokens/s", "memory"}, folded=("mesh",))


def mesh_text(layout: Mapping[str, Any]) -> str:
    """A mesh with what its ranks divide and how its stages take turns, such as ``dp_shard 8 (zero 3) x tp 8``."""
    kept = ", kept" if layout["zero"] == 3 and not layout["reshard"] and layout["pp"] == 1 else ""
    more = {"dp_shard": f" (zero {layout['zero']}{kept})", "pp": f" ({layout.get('schedule')})"}
    parts = [f"{axis} {layout[axis]}{more.get(axis, '')}" for axis in AXES if layout[axis] > 1]
    return " x ".join(parts) or "one rank"


def prediction_notes(prediction: Prediction, *, explain: bool) -> list[str]:
    """The lines below the table."""
    lines = []
    last = prediction.rows[-1]
    if last.minutes is not None and last.epochs is not None:
        lines.append(f"epochs: {_range(last.epochs, 1, '')}, {last.epochs_source}")
    if last.largest_batch is not None and last.largest_batch < _ANY_BATCH:
        computed = "" if last.layout else f"; it computes {last.at_once} of them"
        samples = f"{last.largest_batch} sample{'' if last.largest_batch == 1 else 's'}"
        lines.append(f"a GPU's memory has room for up to {samples} at once{computed}")
    if last.layout is not None:
        lines += _layout_notes(last, explain=explain)
    if explain:
        lines += ["", "where the interval of the step's time comes from, by share of the variance:"]
        causes = [cause for cause in prediction.causes[:_EXPLAINED] if cause.share >= _LEAST_SHARE]
        lines += [_cause(prediction, cause) for cause in causes]
    return lines


def _layout_notes(row: Row, *, explain: bool) -> list[str]:
    """The layout of a transformer, and with ``explain`` what its step and its memory consist of."""
    layout = row.layout
    assert layout is not None
    lines = [
        f"mesh: {mesh_text(layout)}; {layout['micro_batches']} micro-batches of {layout['micro_batch']}, "
        f"{layout['global_batch']} samples a step; recomputed: {layout['recomputation']}; {layout['precision']}"
    ]
    if explain:
        lines.append(f"the step: {_shares(row.step_terms, TERMS)}")
        lines.append(f"the memory of the rank that needs most: {_shares(row.memory_terms, {})}")
    return lines


def _shares(terms: Mapping[str, float], names: Mapping[str, str]) -> str:
    """Terms by their share, the largest first; those below one per cent are left out."""
    whole = sum(terms.values())
    ordered = sorted(terms.items(), key=lambda item: -item[1])
    return ", ".join(f"{value / whole:.0%} {names.get(name, name)}" for name, value in ordered if value > whole / 100)


def memory_warnings(prediction: Prediction) -> list[str]:
    """A sentence for the numbers of nodes on which a rank's memory does not suffice for its samples at once."""
    short = [row for row in prediction.rows if row.largest_batch is not None and row.at_once > row.largest_batch]
    if not short:
        return []
    most, gpu = short[0].largest_batch, prediction.node.gpu
    what = "not even one sample fits" if not most else f"up to {most} fit"
    nodes = nodes_text([row.nodes for row in short])
    samples = max(row.at_once for row in short)
    remedy = "--set batch.micro_batch=N cuts them" if short[0].layout is None else "--mesh auto finds a mesh that fits"
    return [
        f"on {nodes} a rank computes up to {samples} samples at once, for which the memory of {gpu} does not "
        f"suffice ({what}): {remedy}"
    ]


def _cause(prediction: Prediction, cause: Cause) -> str:
    constant = prediction.constants[cause.name]
    return (
        f"  {cause.share:6.1%}  {cause.name} = {constant.value:.4g} {constant.unit}".rstrip()
        + f" ({constant.kind}, ±{constant.spread:.0%}; moves the step by {cause.step:.1%}): {constant.source}"
    )


def duration_range(minutes: Estimate) -> str:
    """A duration with its range, in the unit that suits it."""
    units = (("d", 2880.0, 1 / 1440), ("h", 90.0, 1 / 60), ("min", 1.0, 1.0), ("s", 0.0, 60.0))
    unit, _, factor = next(each for each in units if minutes.value >= each[1])
    return _range(minutes, factor, unit)


def _energy_unit(energies: Sequence[Estimate]) -> tuple[str, float]:
    """The unit in which energies in kWh have few digits, and how many of it make one kWh."""
    most = max((each.high for each in energies), default=1.0)
    return ("kWh", 1.0) if most >= 1 else ("Wh", 1e3) if most >= 1e-3 else ("J", 3.6e6)


def _range(found: Estimate, factor: float, unit: str) -> str:
    """A value of three digits and its range of two, of which the value is never outside."""
    low, high = found.low * factor, found.high * factor
    if low != high:
        low, high = _outward(low, ROUND_FLOOR), _outward(high, ROUND_CEILING)
    value, begin, end = map(_plain, (found.value * factor, low, high))
    whole = f"{value}{_NARROW}{unit}" if unit else value
    if begin == end == value:
        return whole
    # "10-20k" instead of "10k-20k".
    begin = begin[:-1] if begin[-1] in "kM" and begin[-1] == end[-1] else begin
    return f"{whole} {begin}-{end}"


def _outward(number: float, rounding: str) -> float:
    return float(Context(prec=2, rounding=rounding).create_decimal(f"{number:.6g}"))


def _plain(number: float) -> str:
    """Three digits, and k or M for thousands or millions."""
    rounded = float(f"{number:.3g}")
    for size, factor, sign in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(rounded) >= size:
            return f"{rounded / factor:.4g}{sign}"
    return f"{rounded:.0f}" if abs(rounded) >= 100 else f"{rounded:.3g}"

"""A prediction as a table, as JSON, and as notes about what it rests on."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from hpctrain.control.predict.prediction import Cause, Prediction, Row
    from hpctrain.control.predict.values import Estimate

# ``--explain`` lists this many constants, as far as each causes at least this share of the variance.
_EXPLAINED, _LEAST_SHARE = 8, 0.001
# A space at which no line breaks.
_NARROW = "\N{NARROW NO-BREAK SPACE}"
# Where the search for the largest batch ends.
_ANY_BATCH = 1 << 20


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
        "worthwhile_nodes": prediction.worthwhile,
        "constants": [
            {"name": name, "value": each.value, "unit": each.unit, "spread": each.spread}
            | {"source": each.source, "kind": each.kind}
            for name, each in prediction.constants.items()
        ],
        "causes": [asdict(cause) for cause in prediction.causes],
        "warnings": list(prediction.warnings),
    }


def row_record(row: Row) -> dict[str, Any]:
    """The figures of one number of nodes; a figure that is not known is None."""
    found = asdict(row)
    return {key: value for key, value in found.items() if key != "epochs_source"} | {"epochs_source": row.epochs_source}


def prediction_table(prediction: Prediction) -> Table:
    """One line for each number of nodes."""
    from rich import box
    from rich.table import Table

    title = f"{prediction.name} on {prediction.node.gpu}, {prediction.node.local} a node, {prediction.node.engine}"
    # A batch per rank that is the same in all rows goes into the title.
    several = len({row.batch_per_gpu for row in prediction.rows}) > 1
    title += "" if several else f", {prediction.rows[0].batch_per_gpu:.4g} samples a rank"
    table = Table(
        title=title,
        caption="efficiency against one node; waits for reductions; ranges cover 80 % of the cases",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0),
    )
    timed = prediction.rows[0].minutes is not None
    energetic = prediction.rows[0].kwh is not None
    columns = ["nodes", *["batch"] * several, "step", "samples/s", "effic.", "waits"]
    columns += ["time"] * timed + ["kWh"] * (energetic and timed) + ["memory"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in prediction.rows:
        cells = [str(row.nodes), *[f"{row.batch_per_gpu:.4g}"] * several]
        cells += [
            _range(row.step_s, 1e3, "ms"),
            _range(row.samples_per_s, 1, ""),
            _range(row.efficiency, 100, "%"),
            _range(row.communication_share, 100, "%"),
        ]
        cells += [duration_range(row.minutes)] if row.minutes else []
        cells += [_range(row.kwh, 1, "")] if row.kwh and row.minutes else []
        # The range goes onto a second line, so that all columns fit into 80 characters.
        lines = [cell.replace(" ", "\n", 1) for cell in cells]
        table.add_row(*lines, f"{row.memory_bytes.value / 1e9:.3g}{_NARROW}GB")
    return table


def prediction_notes(prediction: Prediction, *, explain: bool) -> list[str]:
    """The lines below the table."""
    lines = []
    last = prediction.rows[-1]
    if last.minutes is not None and last.epochs is not None:
        lines.append(f"epochs: {_range(last.epochs, 1, '')}, {last.epochs_source}")
    if last.largest_batch is not None and last.largest_batch < _ANY_BATCH:
        lines.append(f"a GPU has memory for up to {last.largest_batch} samples at once")
    if explain:
        choices = (f"{nbytes / 1e9:.3g} GB with {name}" for name, nbytes in last.memory_choices.items())
        lines.append("; ".join([f"memory of a rank: {last.memory_bytes.value / 1e9:.3g} GB", *choices]))
    if prediction.worthwhile is not None:
        lines.append(
            f"beyond {prediction.worthwhile} nodes another one adds less than half of the throughput of the first"
        )
    if explain:
        lines += ["", "where the interval of the step's time comes from, by share of the variance:"]
        causes = [cause for cause in prediction.causes[:_EXPLAINED] if cause.share >= _LEAST_SHARE]
        lines += [_cause(prediction, cause) for cause in causes]
    return lines


def memory_warnings(prediction: Prediction) -> list[str]:
    """A sentence for the numbers of nodes on which a rank's memory does not suffice for its samples at once."""
    short = [row for row in prediction.rows if row.largest_batch is not None and row.at_once > row.largest_batch]
    if not short:
        return []
    most, gpu = short[0].largest_batch, prediction.node.gpu
    what = "not even one sample fits" if not most else f"up to {most} fit"
    nodes = ", ".join(str(row.nodes) for row in short)
    samples = max(row.at_once for row in short)
    return [
        f"on {nodes} nodes a rank computes up to {samples} samples at once, for which the memory of {gpu} does not "
        f"suffice ({what}): --set batch.micro_batch=N cuts them"
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


def _range(found: Estimate, factor: float, unit: str) -> str:
    low, value, high = (_plain(each * factor) for each in (found.low, found.value, found.high))
    whole = f"{value}{_NARROW}{unit}" if unit else value
    if low == high == value:
        return whole
    # "10-20k" instead of "10k-20k".
    low = low[:-1] if low[-1] in "kM" and low[-1] == high[-1] else low
    return f"{whole} {low}-{high}"


def _plain(number: float) -> str:
    """Three digits, and k or M for thousands or millions."""
    for size, factor, sign in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(number) >= size:
            return f"{float(f'{number:.3g}') / factor:.4g}{sign}"
    return f"{float(f'{number:.3g}'):.0f}" if abs(number) >= 100 else f"{number:.3g}"

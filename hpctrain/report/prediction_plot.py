"""The picture of a prediction: throughput and efficiency over nodes, with their intervals."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, LogLocator, NullFormatter, NullLocator, ScalarFormatter

from hpctrain.common.cluster.gpu_models import gpu
from hpctrain.report.prediction_table import mesh_text, yardstick

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from matplotlib.axes import Axes

    from hpctrain.control.predict.prediction import Prediction, Row
    from hpctrain.control.predict.values import Estimate

# Okabe and Ito's colours, https://jfly.uni-koeln.de/color
_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#777777"
_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}
# Meshes of a search in one picture.
_MESHES = 15


def prediction_plot(prediction: Prediction) -> bytes:
    """The picture as the content of a PNG file."""
    if prediction.candidates:
        return _mesh_plot(prediction)
    nodes = [row.nodes for row in prediction.rows]
    with _picture(9.6, 4.0) as (figure, content):
        rate, share = figure.subplots(1, 2)
        rates = [row.tokens_per_s or row.samples_per_s for row in prediction.rows]
        first = rates[0].value / nodes[0]
        rate.plot(nodes, [first * count for count in nodes], color=_GREY, linestyle=":", label="in proportion")
        _band(rate, nodes, rates, _BLUE, "predicted")
        what = "tokens" if prediction.rows[0].tokens_per_s else "samples"
        rate.set(yscale="log", ylabel=f"{what} per second")
        rate.yaxis.set_major_formatter(EngFormatter())
        rate.yaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
        rate.yaxis.set_minor_formatter(EngFormatter() if _within_a_decade(prediction) else NullFormatter())
        _band(share, nodes, [row.efficiency for row in prediction.rows], _BLUE, "efficiency")
        share.set(ylabel=f"efficiency against {yardstick(prediction)}", ylim=(0, 1.05))
        for panel in (rate, share):
            _nodes(panel, nodes)
        figure.suptitle(
            f"{prediction.name}, {prediction.node.gpu}, {prediction.node.local} ranks a node", parse_math=False
        )
        return content()


@contextlib.contextmanager
def _picture(width: float, height: float, **style: Any) -> Iterator[tuple[Figure, Callable[[], bytes]]]:
    """A figure of this size in inches, with these further settings, and what makes a PNG of it once it is drawn."""
    settings: dict[Any, Any] = {**_STYLE, **style}
    # A name may have letters that the font has not, which are then drawn as boxes.
    with rc_context(settings), warnings.catch_warnings(action="ignore"):
        figure = Figure(figsize=(width, height), layout="constrained")

        def content() -> bytes:
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=150)
            return file.getvalue()

        yield figure, content


def _mesh_plot(prediction: Prediction) -> bytes:
    """Throughput and memory of the fastest meshes, side by side."""
    shown = prediction.candidates[:_MESHES]
    names = [_mesh_label(row) for row in shown]
    places = range(len(shown))
    with _picture(10.5, 1.4 + 0.36 * len(shown), **{"font.size": 8, "axes.grid.axis": "x"}) as (figure, content):
        rate, held = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        found = [row.tokens_per_s for row in shown if row.tokens_per_s is not None]
        values = [each.value for each in found]
        spread = [
            [each.value - each.low for each in found],
            [each.high - each.value for each in found],
        ]
        rate.barh(places, values, color=_BLUE, height=0.6)
        rate.errorbar(values, places, xerr=spread, fmt="none", ecolor=_GREY, capsize=2, linewidth=0.8)
        rate.set(xlabel="tokens per second (lines: 80 % of the cases)", yticks=places, yticklabels=names)
        rate.xaxis.set_major_formatter(EngFormatter())
        rate.invert_yaxis()
        held.barh(places, [row.memory_bytes.value / 1e9 for row in shown], color=_ORANGE, height=0.6)
        held.axvline(gpu(prediction.node.gpu).memory_bytes / 1e9, color=_GREY, linewidth=0.8)
        held.set(xlabel=f"GB of a rank (line: what {prediction.node.gpu} has)")
        figure.suptitle(
            f"{prediction.name} on {shown[0].gpus} {prediction.node.gpu}: the fastest meshes that fit", parse_math=False
        )
        return content()


def _mesh_label(row: Row) -> str:
    layout = row.layout
    assert layout is not None
    again = "" if layout["recomputation"] == "none" else f", again: {layout['recomputation']}"
    return f"{mesh_text(layout)}\n{layout['micro_batches']} x {layout['micro_batch']}{again}"


def _within_a_decade(prediction: Prediction) -> bool:
    """Whether a logarithmic axis of throughput may have one power of ten only, too few labels to read it by."""
    rates = [row.samples_per_s.value for row in prediction.rows]
    return max(rates) < 30 * min(rates)


def _band(panel: Axes, nodes: Sequence[int], figures: Sequence[Estimate], colour: str, label: str) -> None:
    panel.fill_between(
        nodes, [each.low for each in figures], [each.high for each in figures], color=colour, alpha=0.2, linewidth=0
    )
    panel.plot(nodes, [each.value for each in figures], color=colour, marker="o", markersize=3.5, label=label)


def _nodes(panel: Axes, nodes: Sequence[int]) -> None:
    panel.set(xscale="log", xlabel="nodes (bands: 80 % of the cases)")
    panel.xaxis.set_major_locator(FixedLocator(nodes))
    panel.xaxis.set_major_formatter(ScalarFormatter())
    panel.xaxis.set_minor_locator(NullLocator())
    panel.legend()

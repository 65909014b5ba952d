"""The plot of ``hpctrain bench allreduce``: time over size, with a panel for each number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, NullLocator

from hpctrain.report.benchmarks import COPY, Row, size_text
from hpctrain.report.pictures import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Engines differ by colour (Okabe and Ito's, https://jfly.uni-koeln.de/color), by marker and by line style.
_LINES: dict[str, dict[str, Any]] = {
    "mpi": {"color": "#D55E00", "marker": "o", "linestyle": "-", "linewidth": 2.2},
    "mpi fp16": {"color": "#D55E00", "marker": "o", "linestyle": "--", "linewidth": 1.2},
    "mpi bf16": {"color": "#D55E00", "marker": "x", "linestyle": ":", "linewidth": 1.2},
    "MPI_Allreduce": {"color": "#0072B2", "marker": "s", "linestyle": "--"},
    "horovod": {"color": "#009E73", "marker": "^", "linestyle": "-."},
    "gloo": {"color": "#CC79A7", "marker": "D", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
    "nccl": {"color": "#E69F00", "marker": "v", "linestyle": (0, (3, 1))},
    COPY: {"color": "#444444", "marker": "", "linestyle": ":"},
}
_LABELS = {COPY: "plain copy (limit)", "mpi": "mpi (hpctrain)"}
# The ratio in bytes of one tick to the one before.
_TICK_FACTOR = 16


def plot(rows: Sequence[Row]) -> bytes:
    """Plot the rows of :func:`hpctrain.report.benchmarks.allreduce_rows`, for any numbers of ranks, into a PNG file."""
    numbers = list(dict.fromkeys(row["ranks"] for row in rows))
    with picture(6.4 * len(numbers), 4.6, **{"lines.markersize": 4.5}) as (figure, content):
        panels = figure.subplots(1, len(numbers), squeeze=False, sharey=True)[0]
        for panel, ranks in zip(panels, numbers, strict=True):
            _draw(panel, [row for row in rows if row["ranks"] == ranks])
        panels[0].set_ylabel("time of one all-reduce, slowest rank, median")
        return content("png")


def _draw(panel: Axes, rows: Sequence[Row]) -> None:
    # The legend lists the lines in the order of their right ends.
    last = {row["engine"]: row["median_s"] for row in sorted(rows, key=lambda row: row["bytes"])}
    for engine in sorted(last, key=last.__getitem__, reverse=True):
        points = sorted((row["bytes"], row["median_s"]) for row in rows if row["engine"] == engine)
        panel.plot(*zip(*points, strict=True), label=_LABELS.get(engine, engine), **_LINES[engine])
    sizes = sorted({row["bytes"] for row in rows})
    panel.set(xscale="log", yscale="log", xlabel="size of the buffer (float32)")
    panel.xaxis.set_major_locator(FixedLocator(_ticks(sizes[0], sizes[-1])))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: size_text(nbytes)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(EngFormatter(unit="s"))
    panel.set_title(f"{rows[0]['ranks']} ranks" + (", oversubscribed" if rows[0]["oversubscribed"] else ""))
    panel.legend()


def _ticks(smallest: int, largest: int) -> list[int]:
    ticks = [smallest]
    while ticks[-1] * _TICK_FACTOR <= largest:
        ticks.append(ticks[-1] * _TICK_FACTOR)
    return ticks

"""The curves of several runs over each other, as one picture."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.files.printable import shortened
from hpctrain.common.run.events import kept
from hpctrain.common.run.events.reader import EventsFile
from hpctrain.report.pictures import COLOURS, MARKED, POINTS, picture
from hpctrain.report.tracking.curves import Curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of more curves, the first are drawn.
_PANELS, _COLUMNS = 12, 2
_LEGEND_COLUMNS = 3
# What a model learns comes before these.
_COSTS = ("learning_rate", "seconds", "samples_per_s", "tokens_per_s", "flops_utilisation", "communication_share")
_DASHES = ("-", "--", ":", "-.")
_LONGEST_NAME = 60

_Points = tuple["array[float]", "array[float]"]


def plot_runs(runs: Mapping[str, EventsFile], kind: str) -> bytes:
    """The picture in a format of :func:`hpctrain.report.pictures.picture_format`: a panel for each curve, over steps.

    Args:
        runs: the events of each run, by its name.

    Raises:
        HpctrainError: a run's events are damaged.
    """
    curves = {name: _curves(events) for name, events in runs.items()}
    names = [*dict.fromkeys(name for of_run in curves.values() for name in of_run)]
    # Of what a model learns, and then of its costs, first what most runs have.
    names.sort(key=lambda name: (name.endswith(_COSTS), -sum(name in of_run for of_run in curves.values())))
    names = names[:_PANELS]
    columns = min(_COLUMNS, max(1, len(names)))
    rows = max(1, -(-len(names) // columns))
    height = 2.6 * rows + 0.2 * -(-len(runs) // _LEGEND_COLUMNS)
    looks = list(itertools.islice(_looks(), len(runs)))
    with picture(4.8 * columns, height, **{"lines.linewidth": 1.4}) as (figure, content):
        panels = figure.subplots(rows, columns, squeeze=False).flat
        for panel, name in itertools.zip_longest(panels, names):
            if name is None:
                panel.set_axis_off()
            else:
                _draw(panel, name, [of_run.get(name) for of_run in curves.values()], looks)
        handles = [figure.axes[0].plot([], [], color=color, linestyle=dashes)[0] for color, dashes in looks]
        labels = [shortened(name, _LONGEST_NAME).replace("$", r"\$") for name in runs]
        figure.legend(handles, labels, loc="outside upper left", ncols=_LEGEND_COLUMNS)
        return content(kind)


def _curves(events: EventsFile) -> dict[str, _Points]:
    """The steps and values of each curve of a run, in the order in which they begin."""
    curves_by_name: dict[str, _Points] = {}
    curves = Curves()
    for point in filter(None, map(curves.point, kept(events))):
        for name, value in point.values.items():
            steps, values = curves_by_name.setdefault(name, (array("d"), array("d")))
            steps.append(point.iteration)
            values.append(value)
    return curves_by_name


def _draw(panel: Axes, name: str, curves: Sequence[_Points | None], looks: Sequence[tuple[str, str]]) -> None:
    for points, (color, dashes) in zip(curves, looks, strict=True):
        if points:
            steps, values = map(_thinned, points)
            panel.plot(steps, values, color=color, linestyle=dashes, marker="." if len(steps) < MARKED else "")
    panel.set_title(name, fontsize=9, parse_math=False)
    panel.set_xlabel("step")
    panel.set_xlim(left=0)


def _thinned(values: array[float]) -> NDArray[np.float64]:
    """The values, or the means of consecutive ones."""
    whole = np.array(values)
    if len(whole) <= POINTS:
        return whole
    begins = np.linspace(0, len(whole), POINTS, endpoint=False).astype(np.int64)
    means: NDArray[np.float64] = np.add.reduceat(whole, begins) / np.diff(begins, append=len(whole))
    return means


def _looks() -> Iterator[tuple[str, str]]:
    """Colours and dashes by which runs differ, without end."""
    while True:
        yield from ((color, dashes) for dashes in _DASHES for color in COLOURS)

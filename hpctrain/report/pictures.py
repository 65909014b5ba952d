"""Pictures as files: matplotlib figures in one style."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.common.errors import HpctrainError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, https://jfly.uni-koeln.de/color
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#777777"
COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")

POINTS = 600
"""A curve shows no more; with more values, a point is the mean of consecutive ones."""

MARKED = 30
"""Fewer points than this get a marker each."""

_FORMATS = ("png", "svg", "pdf")
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


def picture_format(file: Path) -> str:
    """The format of a picture with that name.

    Raises:
        HpctrainError: there is no such format.
    """
    kind = file.suffix.lower().removeprefix(".")
    if kind not in _FORMATS:
        raise HpctrainError(
            "HT-format-unknown",
            "--plot {path}: no picture ends in {suffix}",
            f"valid: {', '.join(f'.{known}' for known in _FORMATS)}",
            path=file,
            suffix=file.suffix or "nothing",
        )
    return kind


@contextlib.contextmanager
def picture(width: float, height: float, **style: Any) -> Iterator[tuple[Figure, Callable[[str], bytes]]]:
    """A figure of this size in inches, and what makes the content of a file in a format of it once it is drawn.

    Args:
        style: settings of matplotlib besides those of all pictures.
    """
    # Imported here, because it takes a third of a second that a command without a picture does not need.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {**_STYLE, **style}
    # A name may have letters that the font has not, which are then drawn as boxes.
    with rc_context(settings), warnings.catch_warnings(action="ignore"):
        figure = Figure(figsize=(width, height), layout="constrained")

        def content(kind: str) -> bytes:
            file = io.BytesIO()
            figure.savefig(file, format=kind, dpi=150)
            return file.getvalue()

        yield figure, content

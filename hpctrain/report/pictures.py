"""Pictures as files: matplotlib figures in one style."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, https://jfly.uni-koeln.de/color
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#777777"
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

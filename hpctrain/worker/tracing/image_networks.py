"""Solves for a residual network's layers at any image size, from traces at some sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hpctrain.common.workloads.workload import SCALED, ImageNetwork, Layer, Workload, area

# How often an image's side is halved, at most 5 times in these networks; -1 stands for the constant.
_LEVELS = (-1, 0, 1, 2, 3, 4, 5)
# Areas at these sizes are linearly independent; there are two sizes more than unknowns, which check the solution.
SIZES = (37, 50, 67, 97, 129, 163, 200, 224, 250)


def image_network(trace: Callable[[int], Workload], *, traced: int) -> ImageNetwork:
    """The network at any size, from its workloads at :data:`SIZES`.

    Args:
        trace: gives the workload for images with a side of so many pixels.
        traced: the default size, one of :data:`SIZES`.
    """
    found = [trace(size) for size in SIZES]
    base = found[SIZES.index(traced)]
    plain = {key: Layer.model_fields[key].default for key in SCALED}
    return ImageNetwork(
        name=base.name,
        sample=base.sample,
        layers=tuple(layer.model_copy(update=plain) for layer in base.layers),
        areas=tuple(_terms([each.layers[index] for each in found]) for index in range(len(base.layers))),
        buffers=base.buffers,
        outputs=base.outputs,
        source=base.source,
        traced=traced,
    )


def _terms(at_sizes: Sequence[Layer]) -> dict[str, tuple[tuple[int, int], ...]]:
    found = {}
    for key in SCALED:
        if terms := _solve([getattr(layer, key) for layer in at_sizes], f"{at_sizes[0].name}: {key}"):
            found[key] = terms
    return found


def _solve(values: Sequence[int], what: str) -> tuple[tuple[int, int], ...]:
    areas = np.array([[area(size, level) for level in _LEVELS] for size in SIZES], dtype=float)
    solution, *_ = np.linalg.lstsq(areas, np.array(values, dtype=float), rcond=None)
    terms = tuple((level, round(each)) for level, each in zip(_LEVELS, solution, strict=True) if round(each))
    for size, value in zip(SIZES, values, strict=True):
        got = sum(multiple * area(size, level) for level, multiple in terms)
        if got != value:
            raise ValueError(f"{what} is {value} for images of {size} pixels, and a sum of areas gives {got}")
    return terms

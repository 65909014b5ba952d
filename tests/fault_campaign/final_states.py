"""The arrays of a run's newest checkpoint, put together from the files of whatever ranks wrote it.

A part of an array lies under ``NAME[0:2,0:8 of 4,8]``: where it begins and ends, and the shape of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

_PART = re.compile(r"(.*)\[([\d:,]*) of ([\d,]*)\]", re.DOTALL)

# Type, shape and bytes.
Array = tuple[str, tuple[int, ...], bytes]


def final_state(run: Path) -> dict[str, Array]:
    """The whole arrays by name; what is in no file is zero."""
    arrays, _ = _put_together(run)
    return {name: (str(array.dtype), array.shape, array.tobytes()) for name, array in arrays.items()}


def torn(run: Path) -> Iterator[str]:
    """Which arrays have elements that are in no file, or in two."""
    for name, times in _put_together(run)[1].items():
        if not (times == 1).all():
            yield f"{(times == 0).sum()} elements of {name} in the final state are nowhere, {(times > 1).sum()} twice"


def _put_together(run: Path) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[np.int64]]]:
    """The arrays, and how often each of their elements was found."""
    arrays: dict[str, NDArray[Any]] = {}
    times: dict[str, NDArray[np.int64]] = {}
    newest = max((run / "checkpoints").glob("step-*"))
    for file in sorted(newest.glob("*.safetensors")):
        for key, part in load_file(file).items():
            name, shape, where = _place(key, part)
            whole = arrays.setdefault(name, np.zeros(shape, part.dtype))
            assert (whole.shape, whole.dtype, whole[where].shape) == (shape, part.dtype, part.shape), key
            whole[where] = part
            times.setdefault(name, np.zeros(shape, np.int64))[where] += 1
    return arrays, times


def _place(key: str, part: NDArray[Any]) -> tuple[str, tuple[int, ...], Any]:
    """Whose part it is, of what shape, and where in it."""
    if not (match := _PART.fullmatch(key)):
        return key, part.shape, ...
    name, ranges, sizes = match.groups()
    slices = tuple(slice(*map(int, each.split(":"))) for each in ranges.split(",") if each)
    return name, tuple(int(size) for size in sizes.split(",") if size), slices or ...

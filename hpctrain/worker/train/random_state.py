"""The states of Python's and NumPy's global random generators, from which user data and layers may draw, as arrays."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.checkpoints.layout import RANDOM

NAMES = _PYTHON, _NUMPY = f"{RANDOM}python", f"{RANDOM}numpy"
# The version of the state that Python's random.getstate() returns.
_VERSION = 3


def seed(number: int) -> None:
    """Seed both generators."""
    random.seed(number)
    np.random.seed(number)


def random_state() -> dict[str, NDArray[np.int64]]:
    """The states of both generators, which are Mersenne twisters.

    Returns:
        An array of shape (628,) for each: 624 words, the position in them, whether a normal number was drawn in
        advance, and the two halves of its bits.
    """
    _, words, normal = random.getstate()
    twister: dict[str, Any] = np.random.get_state(legacy=False)
    assert twister["bit_generator"] == "MT19937"
    keys = [*twister["state"]["key"], twister["state"]["pos"]]
    return {_PYTHON: _array(words, normal), _NUMPY: _array(keys, twister["gauss"] if twister["has_gauss"] else None)}


def set_random_state(state: Mapping[str, NDArray[Any]]) -> None:
    """Restore both generators; one whose state is missing stays as it is."""
    if _PYTHON in state:
        words, normal = _parts(state[_PYTHON])
        random.setstate((_VERSION, tuple(words), normal))
    if _NUMPY in state:
        (*keys, place), normal = _parts(state[_NUMPY])
        np.random.set_state(("MT19937", np.array(keys, np.uint32), place, int(normal is not None), normal or 0.0))


def _array(words: Iterable[int], normal: float | None) -> NDArray[np.int64]:
    halves = np.array([normal or 0.0], "<f8").view("<u4")
    return np.array([*words, normal is not None, *halves], np.int64)


def _parts(state: NDArray[Any]) -> tuple[list[int], float | None]:
    *words, ahead, low, high = (int(word) for word in state)
    return words, float(np.array([low, high], "<u4").view("<f8")[0]) if ahead else None

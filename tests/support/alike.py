"""Compares what the same checks found on two devices, or over two backends."""

from __future__ import annotations

import math
import re
from typing import Any

# What comes of random numbers, which a GPU draws otherwise.
DRAWN = ("start_from_rank_0", "back")


def alike(one: Any, other: Any) -> bool:
    """Equal, or almost, or the same words where a checksum, an address or a random number is among them."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in other if name not in DRAWN)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-4)
    if isinstance(one, str) and isinstance(other, str):
        return _words(one) == _words(other)
    return bool(one == other)


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z_]{4,}", re.sub(r"\b[0-9a-f]{6,}\b|cuda", "", text))

"""A rank of which only its place is asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class OneRank:
    """What a communicator says of its place."""

    rank: int
    size: int
    mesh = None

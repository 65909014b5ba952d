"""Times alternatives in turn, so that a drift of the machine's speed affects all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
Call = Callable[[], None]

_BLOCK_ROUNDS = 5
# The first call after a start negotiates, and the second still fills caches.
_WARMUP_CALLS = 2


@dataclass(frozen=True, kw_only=True)
class TimedGroup:
    """Alternatives whose rounds alternate.

    Attributes:
        running: a context entered only while the group is measured, for what would slow down other groups.
    """

    calls: Mapping[str, Call]
    running: Callable[[], AbstractContextManager[None]] = nullcontext


def time_in_turn(
    world: MPI.Intracomm, groups: Sequence[TimedGroup], *, rounds: int, repeats: int = 1
) -> dict[str, list[float]]:
    """The seconds of one call of each alternative in each round, on its slowest rank. Collective.

    Rounds come in blocks of 5. In each block the groups take turns with their rounds, and in each round the
    alternatives, both in a rotating order, after two calls of each that are not timed.

    Args:
        world: the ranks, which begin each call together.
        groups: groups whose calls all have different names.
        repeats: how many calls are timed together, for calls that are short compared with the ranks' different starts.
    """
    from mpi4py import MPI

    seconds = {name: np.zeros(rounds) for group in groups for name in group.calls}
    for block, first in enumerate(range(0, rounds, _BLOCK_ROUNDS)):
        for group in rotated(groups, block):
            with group.running():
                _time_block(world, group, range(first, min(first + _BLOCK_ROUNDS, rounds)), repeats, seconds)
    table = np.stack(list(seconds.values()))
    world.Allreduce(MPI.IN_PLACE, table, MPI.MAX)
    return {name: row.tolist() for name, row in zip(seconds, table, strict=True)}


def _time_block(
    world: MPI.Intracomm, group: TimedGroup, rounds: range, repeats: int, seconds: Mapping[str, np.ndarray]
) -> None:
    for call in group.calls.values():
        for _ in range(_WARMUP_CALLS):
            call()
    for number in rounds:
        for name in rotated(list(group.calls), number):
            call = group.calls[name]
            world.Barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            seconds[name][number] = (time.perf_counter() - start) / repeats


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The items from number ``by`` on, followed by those before it."""
    by %= len(items)
    return [*items[by:], *items[:by]]

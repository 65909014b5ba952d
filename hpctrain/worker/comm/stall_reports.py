"""How a rank reports ranks that stall, and how it ends. ``hpctrain.worker.comm.stalls`` detects them.

Of the process, like :mod:`hpctrain.common.run.stopping`: it is set before a user's script makes a communicator, and
outlives one. Nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.common.errors import HpctrainError


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A rank that others wait for.

    Attributes:
        iteration: the step that they are in, None if unknown.
        waiting_for: what they wait in.
        seconds: for how long, so far.
        state: of its process, in words; "" if nobody could look.
        stack: of its Python threads, the main one first; "" if it did not write one.
    """

    rank: int
    host: str
    iteration: int | None
    waiting_for: str
    seconds: float
    state: str
    stack: str


@dataclass(kw_only=True)
class Reports:
    """The functions by which the training program reports a stall and ends.

    Attributes:
        iteration: the step in progress.
        record: keeps a stall that this rank has to report; called by the thread that watches.
        give_up: ends a rank that hangs inside an MPI call after the last limit, and does not return; None for printing
            the error and aborting the run. Called by the same thread.
    """

    iteration: Callable[[], int | None] = lambda: None
    record: Callable[[Stall], None] = lambda stall: None
    give_up: Callable[[HpctrainError], None] | None = None


reports = Reports()

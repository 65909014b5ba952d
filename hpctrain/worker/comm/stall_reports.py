"""How a rank reports stalled ranks, which ``hpctrain.worker.comm.liveness`` finds, and how it ends.

One object per process, as in :mod:`hpctrain.common.run.stopping`: it is set before a user's script makes a
communicator, and outlives it. Nothing heavy is imported here.
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
        iteration: the step that the others are in, None if unknown.
        waiting_for: the collectives that the others wait in.
        seconds: how long they have waited so far.
        state: a description of the process's state; "" if no rank could look.
        stack: the Python stack of its main thread; "" if it did not write any.
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
        iteration: gives the number of the step in progress, None if unknown.
        record: records a stall that this rank has to report; called by the watching thread.
        give_up: ends a rank that hangs inside an MPI call at the last limit, and does not return; None for printing
            the error and aborting the run. Called by the watching thread.
    """

    iteration: Callable[[], int | None] = lambda: None
    record: Callable[[Stall], None] = lambda stall: None
    give_up: Callable[[HpctrainError], None] | None = None


reports = Reports()

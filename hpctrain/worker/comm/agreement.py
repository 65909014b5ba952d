"""Lets ranks agree while they draw batches, on connections apart from those of the gradients.

A script may draw batches in a thread of its own, while gradients are reduced.
"""

from __future__ import annotations

import pickle  # objects of the ranks of one run
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.worker.comm.base import Communicator

T = TypeVar("T")


class Agreement:
    """What all ranks tell each other on connections of their own; ``what`` names its purpose in messages.

    All ranks call it in the same order.
    """

    def __init__(self, comm: Communicator, what: str = "agreeing on the batches of a loader") -> None:
        self._rank, self.ranks = comm.rank, comm.size
        self.group = comm.kept_group(what)

    def rows(self, own: NDArray[np.float64]) -> NDArray[np.float64]:
        """The rows of all ranks, in rank order."""
        everyone = np.zeros((self.ranks, len(own)))
        everyone[self._rank] = own
        return self.group.allreduce(everyone)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order."""
        own = np.frombuffer(pickle.dumps(value), np.uint8)
        lengths = self.rows(np.array([len(own)]))[:, 0].astype(int)
        everyone = np.zeros((self.ranks, lengths.max()), np.uint8)
        everyone[self._rank, : len(own)] = own
        sent = zip(self.group.allreduce(everyone), lengths, strict=True)
        return [pickle.loads(row[:length].tobytes()) for row, length in sent]  # noqa: S301 - ranks of this very run

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value."""
        sent = np.frombuffer(pickle.dumps(value) if self._rank == 0 else b"", np.uint8)
        length = int(self.group.allreduce(np.array([len(sent)]))[0])
        received = self.group.allreduce(sent if len(sent) else np.zeros(length, np.uint8))
        return pickle.loads(received.tobytes())  # type: ignore[no-any-return]  # noqa: S301 - rank 0 of this very run


def agreement(comm: Communicator) -> Agreement:
    """The agreement of a communicator's ranks. Collective where it is formed: at first, and after ranks died."""
    return Agreement(comm)

"""The boards on which ranks announce their waits to each other: by messages of MPI, or in a store of torch.distributed.

A board's calls raise RuntimeError where what carries it has failed, as after a rank's death.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.common.settings import stall_seconds
from hpctrain.worker.comm.mpi_collectives import duplicate
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG = 1
# How long before it looks for stalled ranks a rank is told of the waits of all others.
_KNOWN_SECONDS = 10.0


class Announced(NamedTuple):
    """A wait that a rank has announced: what the rank waits in, and the seconds that it has waited so far."""

    place: str
    seconds: float


class MpiBoard:
    """A board of MPI's messages, on a communicator of its own. Making and closing it is collective over ``world``.

    To tell all ranks takes as many messages as there are pairs of ranks, so a rank announces a wait only where it lasts
    long, or where another rank has announced one.

    Attributes:
        works: whether the board can be used at all.
    """

    def __init__(self, world: MPI.Intracomm, timeout: Timeout) -> None:
        from mpi4py import MPI

        self.comm = duplicate(world, timeout, "starting to watch waits")
        self.works = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._near_seconds = stall_seconds() - _KNOWN_SECONDS
        self._others = [rank for rank in range(self.comm.size) if rank != self.comm.rank]
        self._own: Announced | None = None
        self._waits: dict[int, Announced] = {}
        # Whether the others know of this rank's wait.
        self._told = False
        self._status = MPI.Status
        self._sent: list[MPI.Request] = []

    def announce(self, wait: Announced | None) -> None:
        """Announce this rank's wait, or that it has ended."""
        self._own = wait
        worth_it = wait is not None and (bool(self._waits) or wait.seconds >= self._near_seconds)
        if worth_it or self._told:
            self._told = wait is not None
            self._sent += [self.comm.isend(wait, rank, tag=_TAG) for rank in self._others]

    def read(self) -> dict[int, Announced]:
        """What each waiting rank has announced, this one's too, in rank order."""
        own = {} if self._own is None else {self.comm.rank: self._own}
        return dict(sorted({**self._waits, **own}.items()))

    def receive(self) -> None:
        """Receive what has arrived."""
        self._sent = [request for request in self._sent if not request.Test()]
        status = self._status()
        while message := self.comm.improbe(tag=_TAG, status=status):
            wait, source = message.recv(), status.Get_source()
            if wait is None:
                self._waits.pop(source, None)
            else:
                self._waits[source] = wait

    def close(self, timeout: Timeout, stop: Callable[[], None]) -> None:
        """Receive all messages that were sent. Collective; ``stop`` ends what announces and receives in a thread."""
        timeout.finish(self.comm.Ibarrier, "shutdown")
        stop()
        timeout.wait(self._all_sent, "shutdown")
        # From here on no rank sends, but messages of others may still have to be received.
        request = self.comm.Ibarrier()
        timeout.wait(lambda: self._all_sent() and bool(request.Test()), "shutdown")
        self.comm.Free()

    def _all_sent(self) -> bool:
        self.receive()
        return not self._sent


class StoreBoard:
    """A board in a store of torch.distributed; calls do not return while the process that keeps it is stopped."""

    works = True

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._keys = [f"hpctrain.wait.{number}" for number in range(size)]
        self._own = self._keys[rank]
        self.announce(None)

    def receive(self) -> None:
        """Receive nothing: :meth:`read` asks the store."""

    def announce(self, wait: Announced | None) -> None:
        self._store.set(self._own, "" if wait is None else json.dumps(wait))

    def read(self) -> dict[int, Announced]:
        # multi_get would wait for a rank that has not begun.
        texts = self._store.multi_get(self._keys) if self._store.check(self._keys) else []
        return {rank: Announced(*json.loads(text)) for rank, text in enumerate(texts) if text}


Board = MpiBoard | StoreBoard

"""The boards on which ranks announce their waits to each other: by messages of MPI, or in a store of torch.distributed.

A board's calls raise RuntimeError where what carries it has failed, as after a rank's death.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpctrain.common.errors import HpctrainError
from hpctrain.common.settings import stall_seconds
from hpctrain.worker.comm.deadlocks import Announced, WaitPlace
from hpctrain.worker.comm.mpi_collectives import duplicate
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG = 1
# How long before it looks for stalled ranks a rank is told of the waits of all others.
_KNOWN_SECONDS = 10.0


class Board(ABC):
    """What the ranks have announced, seen from one of them.

    Attributes:
        works: whether the board can be used at all.
    """

    works = True

    @abstractmethod
    def announce(self, wait: Announced | None) -> None:
        """Announce this rank's wait, or that it has ended."""

    @abstractmethod
    def read(self) -> dict[int, Announced]:
        """What each waiting rank has announced, this one's too, in rank order."""

    @abstractmethod
    def end_waits(self, error: HpctrainError) -> None:
        """Raise an error in the waits of all ranks."""

    @abstractmethod
    def error(self) -> HpctrainError | None:
        """The error of :meth:`end_waits` that any rank has called."""

    def receive(self) -> None:  # noqa: B027  # only messages have to be received
        """Receive what has arrived."""


class MessageBoard(Board):
    """A board of which each rank has a copy, that messages keep up to date.

    Args:
        near_seconds: waits that have not lasted so long are only told to rank 0, which needs all of them; to tell all
            ranks takes as many messages as there are pairs of ranks.
    """

    def __init__(self, rank: int, size: int, near_seconds: float = 0.0) -> None:
        self.rank, self.size = rank, size
        self._near_seconds = near_seconds
        # The ranks that know this rank's wait.
        self._told = range(1)
        self._waits: dict[int, Announced] = {}
        self._error: HpctrainError | None = None

    @abstractmethod
    def _send(self, rank: int, message: object) -> None:
        """Send a message to the :meth:`handle` of another rank."""

    def handle(self, source: int, message: object) -> None:
        """Handle a message of any rank: its wait, None at the end of one, or the record of an error."""
        match message:
            case Announced():
                self._waits[source] = message
            case None:
                self._waits.pop(source, None)
            case dict():
                self._error = HpctrainError.from_record(message)

    def announce(self, wait: Announced | None) -> None:
        if wait is not None and wait.seconds >= self._near_seconds:
            self._told = range(self.size)
        self._tell(self._told, wait)
        if wait is None:
            self._told = range(1)

    def read(self) -> dict[int, Announced]:
        return dict(sorted(self._waits.items()))

    def end_waits(self, error: HpctrainError) -> None:
        self._tell(range(self.size), error.record())

    def error(self) -> HpctrainError | None:
        return self._error

    def _tell(self, ranks: Iterable[int], message: object) -> None:
        self.handle(self.rank, message)
        for rank in ranks:
            if rank != self.rank:
                self._send(rank, message)


class MpiBoard(MessageBoard):
    """A board of MPI's messages, on a communicator of its own. Making and closing it is collective over ``world``."""

    def __init__(self, world: MPI.Intracomm, timeout: Timeout) -> None:
        from mpi4py import MPI

        self.comm = duplicate(world, timeout, "starting to watch waits")
        super().__init__(self.comm.rank, self.comm.size, stall_seconds() - _KNOWN_SECONDS)
        self.works = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._status = MPI.Status
        self._sent: list[MPI.Request] = []

    def _send(self, rank: int, message: object) -> None:
        self._sent.append(self.comm.isend(message, rank, tag=_TAG))

    def receive(self) -> None:
        self._sent = [request for request in self._sent if not request.Test()]
        status = self._status()
        while message := self.comm.improbe(tag=_TAG, status=status):
            self.handle(status.Get_source(), message.recv())

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


class StoreBoard(Board):
    """A board in a store of torch.distributed; calls do not return while the process that keeps it is stopped."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._keys = [f"hpctrain.wait.{each}" for each in range(size)]
        self._own = self._keys[rank]
        self.announce(None)

    def announce(self, wait: Announced | None) -> None:
        self._store.set(self._own, "" if wait is None else json.dumps(asdict(wait)))

    def read(self) -> dict[int, Announced]:
        # multi_get would wait for a rank that has not begun.
        texts = self._store.multi_get(self._keys) if self._store.check(self._keys) else []
        waits = {rank: json.loads(text) for rank, text in enumerate(texts) if text}
        return {rank: Announced(**{**wait, "place": WaitPlace(**wait["place"])}) for rank, wait in waits.items()}

    def end_waits(self, error: HpctrainError) -> None:
        self._store.set("hpctrain.error", json.dumps(error.record()))

    def error(self) -> HpctrainError | None:
        if not self._store.check(["hpctrain.error"]):
            return None
        return HpctrainError.from_record(json.loads(self._store.get("hpctrain.error")))

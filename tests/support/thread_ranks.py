"""Ranks that are threads of one process, for what needs no more of a communicator than its objects and small arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hpctrain.worker.comm.base import Group
from hpctrain.worker.comm.single import SingleCommunicator

_SECONDS = 100


class ThreadCommunicator(SingleCommunicator):
    """One of several ranks. ``lost`` is what a test says."""

    lost = False  # type: ignore[assignment]

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        super().__init__("threads")
        self.rank, self.size = rank, len(shared)
        self._shared, self._barrier = shared, barrier

    def barrier(self) -> None:
        self.allgather_object(None)

    def allgather_object(self, value: Any) -> list[Any]:
        self._shared[self.rank] = value
        self._barrier.wait(_SECONDS)
        everyone = list(self._shared)
        self._barrier.wait(_SECONDS)
        return everyone

    def broadcast_object(self, value: Any) -> Any:
        return self.allgather_object(value)[0]

    def allreduce(self, array: Any, reduction: str = "mean") -> Any:
        reduce = {"mean": np.mean, "sum": np.sum, "min": np.min, "max": np.max}[reduction]
        return reduce(np.stack(self.allgather_object(np.asarray(array))), axis=0)

    def group(self, size: int | None = None, what: str = "") -> Group:
        assert size is None
        return _Everyone(self)


class _Everyone(Group):
    def __init__(self, comm: ThreadCommunicator) -> None:
        super().__init__(comm.rank, comm.size)
        self._comm = comm

    def allreduce(self, array: Any) -> Any:
        return np.add.reduce(self._comm.allgather_object(array.copy())).astype(array.dtype)


def on_ranks(size: int, work: Callable[[ThreadCommunicator], Any]) -> Sequence[Any]:
    """What ``work`` returns on each rank; an error of rank 0 goes on."""
    shared: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    everyone = [ThreadCommunicator(rank, shared, barrier) for rank in range(size)]
    try:
        with ThreadPoolExecutor(size) as pool:
            return [future.result() for future in [pool.submit(work, each) for each in everyone]]
    finally:
        for each in everyone:
            # Batches of a later test have other ranks, or none.
            each.left = True

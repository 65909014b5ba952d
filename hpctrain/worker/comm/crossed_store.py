"""Detects ranks of torch.distributed that wait in different places: see :mod:`hpctrain.worker.comm.crossed`.

They tell it through the store in which they met. A rank that waits looks into it itself, so there is no thread.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from types import TracebackType
from typing import Any

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.crossed import TOLD_SECONDS, Place, crossed
from hpctrain.worker.comm.places import left_at, script_line

_LOOK_SECONDS = 0.5
_ERROR = "hpctrain.crossed"


class StoreCrossings:
    """One rank's part in the detection.

    Args:
        store: of all ranks.
        rank, size: of the run.
        host: this rank's.
        passes: how many backward passes this rank has begun.
    """

    def __init__(self, store: Any, rank: int, size: int, host: str, passes: Callable[[], int]) -> None:
        self._store = store
        self._rank = rank
        self._name = f"rank {rank} on {host}"
        self._passes = passes
        self._keys = [f"hpctrain.place.{each}" for each in range(size)]
        self._number = 0
        self._seen: list[str] = []

    def told(self, kind: str, what: str) -> _Told:
        """A context manager around a wait; call what it yields between two looks."""
        return _Told(self, kind, what)

    def tell(self, kind: str, what: str) -> None:
        """Announce that this rank waits."""
        self._number += 1
        place = Place(kind=kind, what=what, passes=self._passes(), line=script_line(), left=left_at())
        self._set(json.dumps({"number": self._number, "name": self._name, "place": asdict(place)}))

    def take_back(self) -> None:
        """Withdraw the announcement."""
        self._seen = []
        self._set("")

    def look(self) -> None:
        """Raise HpctrainError if the ranks' waits cannot end."""
        with contextlib.suppress(RuntimeError):
            if self._rank == 0:
                self._judge()
            if self._store.check([_ERROR]):
                message, hint = json.loads(self._store.get(_ERROR))
                raise HpctrainError(message, hint, exit_code=1)

    def _judge(self) -> None:
        """On rank 0: a rank in the same wait at two looks was in it all the time between them."""
        if not self._store.check(self._keys):
            return
        before, self._seen = self._seen, [value.decode() for value in self._store.multi_get(self._keys)]
        if self._seen != before or not all(self._seen):
            return
        told = [json.loads(text) for text in self._seen]
        places = {rank: Place(**each["place"]) for rank, each in enumerate(told)}
        if error := crossed(places, lambda rank: str(told[rank]["name"])):
            self._store.set(_ERROR, json.dumps([error.message, error.hint]))

    def _set(self, value: str) -> None:
        # Rank 0, which keeps the store, may be gone: its connections tell of that.
        with contextlib.suppress(RuntimeError):
            self._store.set(self._keys[self._rank], value)


class _Told:
    """One wait: announced when it lasts, and withdrawn at its end."""

    def __init__(self, crossings: StoreCrossings, kind: str, what: str) -> None:
        self._crossings = crossings
        self._kind, self._what = kind, what
        self._told = False
        self._next = 0.0

    def __enter__(self) -> Callable[[], None]:
        self._next = time.monotonic() + TOLD_SECONDS
        return self._pause

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._told:
            self._crossings.take_back()

    def _pause(self) -> None:
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + _LOOK_SECONDS
        if self._told:
            self._crossings.look()
        else:
            self._told = True
            self._crossings.tell(self._kind, self._what)

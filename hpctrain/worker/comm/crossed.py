"""Detects ranks that wait for each other in different places, so that none of the waits can end.

A rank whose loop ended earlier waits at the end of its script, and the others in a reduction; or one takes part in a
collective that the others do not call. Each rank that has waited for a second tells rank 0 where. When all have told,
and not all are in the same place, rank 0 asks once more: who answers is still there, so at the time of the question all
were there at once. That is as many messages as ranks, and only where a run stands still anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.places import left_at, script_line
from hpctrain.worker.comm.timeout import END, REDUCTION, Wait

# A wait of this length is announced; ends of waits travel within a fraction of it.
TOLD_SECONDS = 1.0
_AGAIN_SECONDS = 2.0
_NAMED = 8
# The kinds of messages between ranks.
HEARD = frozenset({"in", "out", "still", "yes", "crossed"})

_APART = "the ranks are waiting for each other in different places, and would"
_HINTS = {
    True: "give every rank the same number of batches, as ht.shard does, or put the loop in `with ht.join(model):`, "
    "so that ranks that finish early wait for the others",
    False: "call backward() the same number of times on every rank, and collective calls (comm.barrier(), "
    "ht.should_stop(), saving by all ranks, …) at the same places",
}


_PAIRED_HINT = (
    "call collective methods (comm.barrier(), ht.should_stop(), ht.mean(), saving by all ranks, …) on all ranks and in "
    "the same order, with arrays of one shape and type: not under `if comm.rank == 0:`"
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank waits.

    Attributes:
        kind: of the wait.
        what: its description.
        passes: backward passes begun.
        line: the script's file and line.
        left: where the script was left before its last line; see :func:`hpctrain.worker.comm.places.left_at`.
    """

    kind: str
    what: str
    passes: int
    line: str = ""
    left: str = ""

    def __str__(self) -> str:
        if self.kind == END:
            return f"at the end of its script{self.left}, after backward pass {self.passes}"
        at = f" at {self.line}" if self.line else ""
        if self.kind == REDUCTION:
            return f"in the reduction of gradients{at}, in its backward pass {self.passes}"
        return f"in {self.what}{at}, after backward pass {self.passes}"


def crossed(places: Mapping[int, Place], names: Callable[[int], str]) -> HpctrainError | None:
    """The error if the waits of all ranks cannot end; None if they wait in the same place."""
    if len({place.kind for place in places.values()}) == 1:
        return None
    sides = _sides({names(rank): str(place) for rank, place in sorted(places.items())})
    hint = _HINTS[any(place.kind == END for place in places.values())]
    return HpctrainError(f"{_APART} wait forever: {sides}", hint, exit_code=1)


def paired(places: Mapping[str, str]) -> HpctrainError:
    """The error for ranks, by their names, whose messages met although they belong to calls in different places."""
    return HpctrainError(f"{_APART} take each other's values: {_sides(places)}", _PAIRED_HINT, exit_code=1)


def _sides(places: Mapping[str, str]) -> str:
    by_place: dict[str, list[str]] = {}
    for name, place in places.items():
        by_place.setdefault(place, []).append(name)
    return "; ".join(f"{_some(ranks)} {where}" for where, ranks in by_place.items())


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


class Crossings:
    """One rank's part in the detection. It gets the rank's waits from the thread that watches over them.

    Args:
        rank, size: of the run.
        send: sends a message to a rank's :meth:`hear`.
        names: a rank in words.
        passes: how many backward passes this rank has begun.

    Attributes:
        error: what is to be raised in every wait, once that is known.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        send: Callable[..., None],
        names: Callable[[int], str],
        passes: Callable[[], int],
    ) -> None:
        self._rank, self._size = rank, size
        self._send = send
        self._names = names
        self._passes = passes
        self.error: HpctrainError | None = None
        self._wait: Wait | None = None
        self._number = 0
        self._told = False
        # Of rank 0: who waits where, each with the number of the wait, and who has confirmed that.
        self._places: dict[int, tuple[int, Place]] = {}
        self._confirmed: set[int] = set()
        self._ask_at = 0.0

    def look(self, wait: Wait | None, now: float) -> None:
        """Report to rank 0 a wait that lasts, or its end."""
        if wait != self._wait:
            if self._told:
                self._tell(0, "out")
            self._wait, self._told = wait, False
            self._number += 1
        if wait is not None and not self._told and now - wait.since > TOLD_SECONDS:
            self._told = True
            place = Place(kind=wait.kind, what=wait.what, passes=self._passes(), line=script_line(), left=left_at())
            self._tell(0, "in", self._number, place)
        if self._rank == 0:
            self._judge(now)

    def hear(self, source: int, kind: str, *values: object) -> None:
        """Handle a message of another rank or of this one."""
        match kind, values:
            case "in", (int(number), Place() as place):
                self._places[source] = (number, place)
            case "out", ():
                self._places.pop(source, None)
                self._confirmed.clear()
            case "still", ():
                if self._told:
                    self._tell(0, "yes", self._number)
            case "yes", (int(number),):
                if source in self._places and self._places[source][0] == number:
                    self._confirmed.add(source)
            case "crossed", (str(message), str(hint)):
                self.error = HpctrainError(message, hint, exit_code=1)

    def _judge(self, now: float) -> None:
        if len(self._places) < self._size or self.error is not None:
            return
        error = crossed({rank: place for rank, (_, place) in self._places.items()}, self._names)
        if error is None:
            return
        if len(self._confirmed) == self._size:
            self._tell_all("crossed", str(error.message), error.hint or "")
        elif now >= self._ask_at:
            self._ask_at = now + _AGAIN_SECONDS
            self._confirmed.clear()
            self._tell_all("still")

    def _tell_all(self, *message: object) -> None:
        for rank in range(self._size):
            self._tell(rank, *message)

    def _tell(self, rank: int, *message: object) -> None:
        if rank == self._rank:
            self.hear(rank, *message)  # type: ignore[arg-type]
        else:
            self._send(rank, *message)

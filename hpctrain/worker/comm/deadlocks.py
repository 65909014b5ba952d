"""What is said of ranks that wait for each other in different places, so that none of the waits can end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hpctrain.common.errors import HpctrainError, abbreviated
from hpctrain.worker.comm.timeout import END, REDUCTION

# How often a wait has to be announced again before it counts; one inside a call of a library cannot be seen to go on.
_AGAIN, _AGAIN_BLOCKED = 2, 5
# How many ranks a message names.
_NAMED = 8

_BATCHES_HINT = (
    "give every rank the same number of batches, as ht.shard does, and leave a loop over them on all ranks alike"
)
_CALLS_HINT = (
    "call backward() the same number of times on every rank, and collective calls (comm.barrier(), ht.should_stop(), "
    "ht.mean(), saving by all ranks, …) in the same order and with arrays of one shape and type: not under "
    "`if comm.rank == 0:`"
)
# What computing with a batch is called, of which each rank holds some rows.
WHOLE_BATCH = "of a whole batch"
_WHOLE_BATCH_HINT = (
    "all ranks compute together what follows from a batch: take it out of the condition, such as `if comm.rank == 0:`, "
    "and leave there what prints or saves its numbers; only rank 0's output is shown anyway"
)


@dataclass(frozen=True, kw_only=True)
class WaitPlace:
    """Where a rank waits.

    Attributes:
        passes: how many backward passes the rank has begun.
        line: file and line of the script, "" if unknown.
        left: where the script ended before its last line, as a clause.
        blocked: whether it waits inside a call of a library.
    """

    kind: str
    what: str
    passes: int
    line: str = ""
    left: str = ""
    blocked: bool = False

    def __str__(self) -> str:
        # Those of DistributedDataParallel are not counted.
        after = f", after backward pass {self.passes}" if self.passes else ""
        if self.kind == END:
            return f"at the end of its script{self.left}{after}"
        at = f" at {self.line}" if self.line else ""
        if self.kind == REDUCTION:
            return f"in the reduction of gradients{at}, in its backward pass {self.passes}"
        return f"in {self.what}{at}{after}"


def deadlock_error(places: Mapping[int, WaitPlace], names: Callable[[int], str]) -> HpctrainError | None:
    """The error for ranks whose waits cannot end; None if all wait in the same place."""
    kinds = {place.kind for place in places.values()}
    if len(kinds) == 1:
        return None
    shown = {names(rank): str(place) for rank, place in sorted(places.items())}
    return HpctrainError(
        "HT-ranks-in-different-places",
        "the ranks are waiting for each other in different places, and would wait forever: {where}",
        _hint(shown, _BATCHES_HINT if END in kinds else _CALLS_HINT),
        exit_code=1,
        **_values(shown),
    )


def mismatch_error(of_ranks: Iterable[tuple[str, str]]) -> HpctrainError:
    """The error for ranks whose messages met although they belong to different calls: each one's host and place."""
    shown = {f"rank {rank} on {host}": place for rank, (host, place) in enumerate(of_ranks)}
    return HpctrainError(
        "HT-ranks-in-different-calls",
        "the ranks are waiting for each other in different places, and would take each other's values: {where}",
        _hint(shown, _CALLS_HINT),
        exit_code=1,
        **_values(shown),
    )


def _hint(places: Mapping[str, str], otherwise: str) -> str:
    return _WHOLE_BATCH_HINT if any(WHOLE_BATCH in place for place in places.values()) else otherwise


def _values(places: Mapping[str, str]) -> dict[str, object]:
    ranks_at: dict[str, list[str]] = {}
    for name, place in places.items():
        ranks_at.setdefault(place, []).append(name)
    where = "; ".join(f"{abbreviated(ranks, _NAMED)} {place}" for place, ranks in ranks_at.items())
    # Of the first ranks alone, as every rank is sent the error.
    return {"where": where, "places": dict(itertools.islice(places.items(), _NAMED))}


@dataclass(frozen=True, kw_only=True)
class Announced:
    """A wait that a rank has announced.

    Attributes:
        number: counts the rank's waits.
        times: how often this one was announced again.
        seconds: how long the rank's longest wait had lasted.
        leads: whether the script itself waits.
    """

    number: int
    times: int
    place: WaitPlace
    seconds: float = 0.0
    leads: bool = True


class Judge:
    """Finds, on rank 0, waits of all ranks that cannot end.

    Args:
        long: the seconds after which waits count that the script does not wait for itself, as those in groups. They
            cannot end where a rank has ended its script: it calls no collective any more, and all others wait.
    """

    def __init__(self, long: float) -> None:
        self._long = long
        # What the ranks had announced when all of them waited, not all in the same place.
        self._first: dict[int, Announced] = {}

    def judge(self, waits: Mapping[int, Announced], names: Callable[[int], str]) -> HpctrainError | None:
        """The error for the current waits of all ranks; None as long as one of them may have ended meanwhile."""
        others = [wait for wait in waits.values() if wait.place.kind != END]
        ended = len(others) < len(waits) and all(wait.seconds >= self._long for wait in others)
        counts = ended or all(wait.leads for wait in waits.values())
        error = deadlock_error({rank: wait.place for rank, wait in waits.items()}, names) if counts else None
        if error is None or [wait.number for wait in self._first.values()] != [wait.number for wait in waits.values()]:
            self._first = {} if error is None else dict(waits)
            return None
        for rank, wait in waits.items():
            if wait.times - self._first[rank].times < (_AGAIN_BLOCKED if wait.place.blocked else _AGAIN):
                return None
        return error

"""Detects ranks that wait for each other in different places, so that none of the waits can end.

A rank whose loop ended earlier waits at the end of its script, and the others in a reduction; or one takes part in a
collective that the others do not call. A rank that has waited for a second announces to rank 0 where, and again every
two seconds: each time after its waiting thread itself has found that the wait goes on, because on a busy machine a wait
may be over long before its thread runs again. When all ranks wait, not all in the same place, and each announces the
same wait twice more, none of these waits can end. It takes a few small messages, and only where a run stands still.

Ranks that MPI started send each other messages (:class:`DeadlockDetector`). Ranks of torch.distributed use the store in
which they met (:class:`StoreDeadlockDetector`).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

from hpctrain.common.errors import HpctrainError, abbreviated
from hpctrain.worker.comm.places import left_at, loop_left, script_line
from hpctrain.worker.comm.timeout import COLLECTIVE, END, REDUCTION, Wait

# A wait is announced after this time, and again so often. Waits that end sooner cost no message.
ANNOUNCE_SECONDS = 1.0
_AGAIN_SECONDS = 2.0
# How often a wait has to be announced again before it counts; one inside a call of a library cannot be seen to go on.
_AGAIN, _AGAIN_BLOCKED = 2, 5
_STORE_SECONDS = 0.5
# How long a store may take to answer.
_ANSWER_SECONDS = 2.0
_STORE_ERROR = "hpctrain.deadlock"
_STORE_LATE = "hpctrain.late"
# In which time ranks leave a call of PyTorch's own: the first closes its connections.
_LEAVE_SECONDS = 3.0
# How many ranks a message names.
_NAMED = 8
# The kinds of messages between detectors.
MESSAGES = frozenset({"in", "out", "deadlock"})

T = TypeVar("T")

_HINTS = {
    True: "give every rank the same number of batches, as ht.shard does",
    False: "call backward() the same number of times on every rank, and collective calls (comm.barrier(), "
    "ht.should_stop(), saving by all ranks, …) at the same places",
}


_PAIRED_HINT = (
    "call collective methods (comm.barrier(), ht.should_stop(), ht.mean(), saving by all ranks, …) on all ranks and in "
    "the same order, with arrays of one shape and type: not under `if comm.rank == 0:`"
)
# What computing with a batch is called, of which each rank holds some rows.
WHOLE_BATCH = "of a whole batch"
_BATCH_HINT = (
    "all ranks compute together what follows from a batch: take it out of the condition, such as `if comm.rank == 0:`, "
    "and leave there what prints or saves its numbers; only rank 0's output is shown anyway"
)
_LOOP_HINT = (
    "leave a loop over batches on all ranks at the same batch: under a condition of what all of them have, such as a "
    "loss of the whole batch, ht.mean() or ht.should_stop()"
)


@dataclass(frozen=True, kw_only=True)
class WaitPlace:
    """Where a rank waits.

    Attributes:
        passes: how many backward passes the rank has begun.
        line: file and line of the script, "" if unknown.
        left: where the script ended before its last line; see :func:`hpctrain.worker.comm.places.left_at`.
        loop: where the script last left a loop over batches; see :func:`hpctrain.worker.comm.places.loop_left`.
        blocked: whether it waits inside a call of a library.
    """

    kind: str
    what: str
    passes: int
    line: str = ""
    left: str = ""
    loop: str = ""
    blocked: bool = False

    def __str__(self) -> str:
        # Those of DistributedDataParallel are not counted.
        after = f", after backward pass {self.passes}" if self.passes else ""
        after += f", and after it left its loop over batches at {self.loop}" if self.loop else ""
        if self.kind == END:
            return f"at the end of its script{self.left}{after}"
        at = f" at {self.line}" if self.line else ""
        if self.kind == REDUCTION:
            return f"in the reduction of gradients{at}, in its backward pass {self.passes}"
        return f"in {self.what}{at}{after}"


def _place(kind: str, what: str, passes: int) -> WaitPlace:
    """Where this rank is in a wait."""
    return WaitPlace(kind=kind, what=what, passes=passes, line=script_line(), left=left_at(), loop=loop_left())


def deadlock_error(places: Mapping[int, WaitPlace], names: Callable[[int], str]) -> HpctrainError | None:
    """The error for ranks whose waits cannot end; None if all wait in the same place."""
    if len({place.kind for place in places.values()}) == 1:
        return None
    together = len({place.loop for place in places.values()}) == 1
    named = {names(rank): replace(each, loop="") if together else each for rank, each in sorted(places.items())}
    hint = _HINTS[any(place.kind == END for place in places.values())]
    if not together:
        hint = _LOOP_HINT
    elif any(WHOLE_BATCH in place.what for place in places.values()):
        hint = _BATCH_HINT
    return HpctrainError(
        "HT-ranks-in-different-places",
        "the ranks are waiting for each other in different places, and would wait forever: {where}",
        hint,
        exit_code=1,
        where=_by_place({name: str(place) for name, place in named.items()}),
        # Of the first ranks alone, as every rank is sent the error.
        places={name: asdict(named[name]) for name in list(named)[:_NAMED]},
    )


def mismatch_error(places: Mapping[str, str]) -> HpctrainError:
    """The error for ranks whose messages met although they belong to different calls; ``places`` is by rank name."""
    return HpctrainError(
        "HT-ranks-in-different-calls",
        "the ranks are waiting for each other in different places, and would take each other's values: {where}",
        _BATCH_HINT if any(WHOLE_BATCH in place for place in places.values()) else _PAIRED_HINT,
        exit_code=1,
        where=_by_place(places),
        places=places,
    )


def _by_place(places: Mapping[str, str]) -> str:
    ranks_at: dict[str, list[str]] = {}
    for name, place in places.items():
        ranks_at.setdefault(place, []).append(name)
    return "; ".join(f"{abbreviated(ranks, _NAMED)} {where}" for where, ranks in ranks_at.items())


@dataclass(frozen=True, kw_only=True)
class Announced:
    """A wait that a rank has announced.

    Attributes:
        number: counts the rank's waits.
        times: how often this one was announced again.
    """

    number: int
    times: int
    place: WaitPlace


class _Judge:
    """Finds, on rank 0, waits of all ranks that cannot end."""

    def __init__(self) -> None:
        # What the ranks had announced when all of them waited, not all in the same place.
        self._first: dict[int, Announced] = {}

    def judge(self, waits: Mapping[int, Announced], names: Callable[[int], str]) -> HpctrainError | None:
        """The error for the current waits of all ranks; None as long as one of them may have ended meanwhile."""
        error = deadlock_error({rank: each.place for rank, each in waits.items()}, names)
        if error is None or [each.number for each in self._first.values()] != [each.number for each in waits.values()]:
            self._first = {} if error is None else dict(waits)
            return None
        for rank, each in waits.items():
            if each.times - self._first[rank].times < (_AGAIN_BLOCKED if each.place.blocked else _AGAIN):
                return None
        return error


class DeadlockDetector:
    """One rank's part in the detection by messages. The thread that watches the rank's waits calls :meth:`look`.

    Args:
        send: sends a message to a rank's :meth:`receive`.
        names: gives a rank's name and host for messages.
        passes: gives how many backward passes this rank has begun.

    Attributes:
        error: the error to raise in every wait, once a deadlock is known.
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
        self._announced: Announced | None = None
        # When to announce the wait again, and how often it had been polled the last time.
        self._next, self._polls = 0.0, 0
        # On rank 0: what each rank has announced.
        self._waits: dict[int, Announced] = {}
        self._judge = _Judge()

    def look(self, wait: Wait | None, now: float) -> None:
        """Announce a long wait to rank 0, or its end."""
        if wait != self._wait:
            if self._announced:
                self._deliver(0, "out")
            self._wait, self._announced = wait, None
            self._number += 1
        if wait is not None:
            self._announce(wait, now)
        if self._rank == 0 and len(self._waits) == self._size and self.error is None:
            waits = dict(sorted(self._waits.items()))
            if error := self._judge.judge(waits, self._names):
                self.end_waits(error)

    def end_waits(self, error: HpctrainError) -> None:
        """Raise an error in the waits of all ranks."""
        self._send_all("deadlock", error.record())

    def place_of(self, wait: Wait) -> WaitPlace:
        """Where this rank is in a wait of its own."""
        return replace(_place(wait.kind, wait.what, self._passes()), blocked=wait.blocked)

    def _announce(self, wait: Wait, now: float) -> None:
        if (before := self._announced) is None:
            if now - wait.since <= ANNOUNCE_SECONDS:
                return
            self._announced = Announced(number=self._number, times=0, place=self.place_of(wait))
        # The first of two polls may have begun before the last announcement.
        elif now >= self._next and (wait.blocked or wait.polls >= self._polls + 2):
            self._announced = replace(before, times=before.times + 1)
        else:
            return
        self._next, self._polls = now + _AGAIN_SECONDS, wait.polls
        self._deliver(0, "in", self._announced)

    def receive(self, source: int, kind: str, *values: object) -> None:
        """Handle a message of another rank or of this one."""
        match kind, values:
            case "in", (Announced() as announced,):
                self._waits[source] = announced
            case "out", ():
                self._waits.pop(source, None)
            case "deadlock", (dict(record),):
                self.error = HpctrainError.from_record(record)

    def _send_all(self, *message: object) -> None:
        for rank in range(self._size):
            self._deliver(rank, *message)

    def _deliver(self, rank: int, *message: object) -> None:
        if rank == self._rank:
            self.receive(rank, *message)  # type: ignore[arg-type]
        else:
            self._send(rank, *message)


class StoreDeadlockDetector:
    """One rank's part in the detection through a store, into which a rank looks while it waits.

    Args:
        names: each rank's name and host for messages.
        keeper: what keeps the store, and so is stopped or gone where that does not answer: a rank with its name, or -1
            with that of another process.
        passes: gives how many backward passes this rank has begun.
    """

    def __init__(
        self, store: Any, rank: int, names: Sequence[str], keeper: Mapping[int, str], passes: Callable[[], int]
    ) -> None:
        self._store = store
        self._rank, self._names, self._keeper = rank, names, keeper
        self._passes = passes
        self._keys = [f"hpctrain.place.{each}" for each in range(len(names))]
        self._number = 0
        self._announcement: Announced | None = None
        self._judge = _Judge()
        self._set("")

    def stalled(self) -> Mapping[int, str]:
        """The ranks that wait for no other while this one does, by number; none where that is not known."""
        if self._announcement is None:
            return {}
        reading = _beside(self._announced)
        try:
            texts = reading.result(_ANSWER_SECONDS)
        except TimeoutError:
            return self._keeper
        except RuntimeError:
            return {}
        return {rank: self._names[rank] for rank, text in enumerate(texts) if not text}

    def missing(self, *, late: bool) -> Mapping[int, str]:
        """The ranks that are not known to have left a call of PyTorch's own, which ranks leave at nearly the same time.

        Args:
            late: this rank waited in it to the limit. Otherwise it lost a connection: then none is missing unless
                another rank has waited so long, as where one has died.
        """
        leaving = _beside(lambda: self._leave(late=late))
        with contextlib.suppress(TimeoutError, RuntimeError):
            if not leaving.result(2 * _LEAVE_SECONDS):
                return {}
        return self.stalled()

    def _leave(self, *, late: bool) -> bool:
        """Say that this rank leaves the call, and wait for others to; returns whether one had waited to the limit."""
        self.announce(COLLECTIVE, "a call of torch.distributed")
        if late:
            self._store.set(_STORE_LATE, "1")
        if not _soon(lambda: self._store.check([_STORE_LATE]), _LEAVE_SECONDS / 3):
            return False
        _soon(lambda: all(self._announced() or [""]), _LEAVE_SECONDS)
        return True

    def _announced(self) -> list[str]:
        """What each rank has announced; nothing before all have begun."""
        return [each.decode() for each in self._store.multi_get(self._keys)] if self._store.check(self._keys) else []

    def watching(self, kind: str, what: str) -> _WatchedWait:
        """A context manager around a wait; call the function that it yields between two polls."""
        return _WatchedWait(self, kind, what)

    def announce(self, kind: str, what: str) -> None:
        """Announce that this rank waits."""
        self._number += 1
        self._tell(Announced(number=self._number, times=0, place=_place(kind, what, self._passes())))

    def withdraw(self) -> None:
        """Withdraw the announcement."""
        self._announcement = None
        self._set("")

    def look(self, *, again: bool = False) -> None:
        """Raise HpctrainError if the ranks' waits cannot end.

        Args:
            again: whether to announce the wait again, which the waiting thread has found to go on.
        """
        with contextlib.suppress(RuntimeError):
            if again and (own := self._announcement):
                self._tell(replace(own, times=own.times + 1))
            if self._rank == 0:
                self._judge_all()
            if self._store.check([_STORE_ERROR]):
                raise HpctrainError.from_record(json.loads(self._store.get(_STORE_ERROR)))

    def _judge_all(self) -> None:
        texts = self._announced()
        if not (texts and all(texts)):
            return
        values = [json.loads(text) for text in texts]
        waits = {
            rank: Announced(number=each["number"], times=each["times"], place=WaitPlace(**each["place"]))
            for rank, each in enumerate(values)
        }
        if error := self._judge.judge(waits, lambda rank: str(values[rank]["name"])):
            self._store.set(_STORE_ERROR, json.dumps(error.record()))

    def _tell(self, own: Announced) -> None:
        self._announcement = own
        self._set(json.dumps({**asdict(own), "name": self._names[self._rank]}))

    def _set(self, value: str) -> None:
        # Rank 0, which keeps the store, may be gone. The collective's own connections report that.
        with contextlib.suppress(RuntimeError):
            self._store.set(self._keys[self._rank], value)


class _WatchedWait:
    """A wait that is announced once it has lasted, and withdrawn at its end."""

    def __init__(self, detector: StoreDeadlockDetector, kind: str, what: str) -> None:
        self._detector = detector
        self._kind, self._what = kind, what
        self._announced = False
        self._next = self._again = 0.0
        self._looking: Future[None] | None = None

    def __enter__(self) -> Callable[[], None]:
        self._next = time.monotonic() + ANNOUNCE_SECONDS
        return self._pause

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Others whose time is over at nearly the same time must not take this rank for the one that they wait for.
        late = isinstance(error, HpctrainError) and error.code == "HT-wait-timed-out"
        if self._announced and not late and self._store_answers():
            self._detector.withdraw()

    def _pause(self) -> None:
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + _STORE_SECONDS
        if not self._announced:
            self._announced, self._again = True, now + _AGAIN_SECONDS
            self._detector.announce(self._kind, self._what)
        elif self._looking is None or self._looking.done():
            if self._looking is not None:
                self._looking.result()
            if again := now >= self._again:
                self._again = now + _AGAIN_SECONDS
            self._looking = _beside(lambda: self._detector.look(again=again))

    def _store_answers(self) -> bool:
        # Calls of a store wait for each other.
        return self._looking is None or bool(futures.wait([self._looking], _ANSWER_SECONDS).done)


def _soon(found: Callable[[], bool], seconds: float) -> bool:
    """Whether something is so within some seconds."""
    end = time.monotonic() + seconds
    while not (there := found()) and time.monotonic() < end:
        time.sleep(_LEAVE_SECONDS / 30)
    return there


def _beside(call: Callable[[], T]) -> Future[T]:
    """Call a function of a store in a thread of its own: while the process that keeps the store is stopped, it does not
    return, and knows no limit.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="hpctrain-store", daemon=True).start()
    return future

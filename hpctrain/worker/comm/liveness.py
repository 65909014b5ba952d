"""Knows which ranks wait and which do not: one thread of each rank watches its waits, and announces those that last.

A rank that has waited for a second announces where, and again every two seconds: each time after its waiting thread
itself has found that the wait goes on, because on a busy machine a wait may be over long before its thread runs again.
It takes a few bytes, and only where a run stands still. Three answers follow:

* All ranks wait, not all in the same place, and each has announced the same wait twice more: none of these waits can
  end. A rank's loop has ended earlier, or it takes part in a collective that the others do not call. Rank 0 finds that,
  and every rank raises the error that names the places.
* A rank has waited for ``HPCTRAIN_STALL`` seconds. Those that have announced no wait are stalled: stopped,
  or busy with something else. The lowest waiting rank says so, and the lowest one on the same host reports what can be
  learnt there about the process. The stalled rank need not cooperate.
* The limit of a wait is over: its error names the stalled ranks.

Waits of the control plane, of hpctrain's engines and of Horovod's reductions are watched. A rank that waits in a call
of PyTorch's own over Gloo or NCCL does not count as waiting: their own limits hold there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpctrain.common.errors import HpctrainError, abbreviated
from hpctrain.common.run.events.kinds import StallEvent
from hpctrain.common.settings import TIMEOUT, stall_seconds
from hpctrain.common.stderr import tell
from hpctrain.worker.comm.boards import Board
from hpctrain.worker.comm.deadlocks import Announced, Judge, WaitPlace
from hpctrain.worker.comm.rank_run import end_job
from hpctrain.worker.comm.script_location import left_at, script_line
from hpctrain.worker.comm.stalls import reports, request_stack
from hpctrain.worker.comm.timeout import COLLECTIVE, Timeout, Wait

# A wait is announced after this time at most, and again so often. Waits that end sooner cost nothing.
ANNOUNCE_SECONDS, _AGAIN_SECONDS = 1.0, 2.0
# How long to wait for the announcements of other ranks; ranks that share a core may need most of it.
_ANSWER_SECONDS = 2.0
# A rank that has not repeated its announcement for so long does not wait any more, but is stopped.
_SILENT_SECONDS = 8.0
# The time until the stalled ranks of a lasting wait are looked for again.
_LOOK_AGAIN_SECONDS = 10.0
# How many stalled ranks are inspected at most. On a host that hangs, all are in the same state.
_LOOKS = 4
# In which time the limits of ranks end that wait in one call of PyTorch's own: the first closes its connections.
_LEAVE_SECONDS = 3.0
# How long the last line of a run may take to mpirun.
_FORWARD_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A rank: its number at the start of the run, which messages use, its host, and its process.

    Attributes:
        pid: the process's number in its ``namespace`` of numbers, of which each container may have its own.
        started: when the process began, by psutil.
    """

    first_rank: int
    host: str
    pid: int
    namespace: int
    started: float

    def __str__(self) -> str:
        return f"rank {self.first_rank} on {self.host}"


@dataclass(kw_only=True)
class _LongWait:
    """What this rank has found out in a wait.

    Attributes:
        at: when to look for stalled ranks.
        named: all ranks found stalled so far in this wait.
        reported: whether this rank has reported a stall in this wait.
    """

    wait: Wait
    at: float
    named: set[int] = field(default_factory=set)
    reported: bool = False


class LivenessWatch:
    """Watches the waits of this rank, and raises in them what :meth:`look` finds.

    Args:
        peers: all ranks of the board, in order.
        passes: gives how many backward passes this rank has begun.
    """

    def __init__(
        self,
        board: Board,
        timeout: Timeout,
        rank: int,
        peers: Sequence[Peer],
        passes: Callable[[], int],
    ) -> None:
        self._board, self._timeout = board, timeout
        self._rank, self._peers = rank, peers
        self._passes = passes
        self._stall = stall_seconds()
        self._answer_seconds = min(_ANSWER_SECONDS, self._stall / 2)
        self._announce_seconds = min(ANNOUNCE_SECONDS, self._stall / 4)
        self._works = board.works
        self._error: HpctrainError | None = None
        # The wait that is announced once it lasts, its number, and what was announced last.
        self._wait: Wait | None = None
        self._number = 0
        self._own: Announced | None = None
        # When to announce the wait again, and how often it had been polled the last time.
        self._next, self._polls = 0.0, 0
        self._judge = Judge(self._stall - _AGAIN_SECONDS)
        self._long: _LongWait | None = None
        # What each rank has announced last, and since when.
        self._heard: dict[int, tuple[Announced, float]] = {}
        self._stalled: list[int] = []
        # The ranks that wait, or whose limit of a wait is over, once this one's is.
        self._expired: set[int] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpctrain-waits", daemon=True)

    def start(self) -> None:
        """Start to watch in a thread."""
        self._timeout.watch = self
        self._thread.start()

    def stop(self, seconds: float | None = None) -> None:
        """Stop watching, and wait so long for the thread to end. Idempotent."""
        self._closing.set()
        self._thread.join(seconds)
        # Another watch may have replaced this one already.
        if self._timeout.watch is self:
            self._timeout.watch = None

    def deadlock(self) -> HpctrainError | None:
        """The error to raise in every wait, once none can end."""
        return self._error

    def stalled(self) -> Mapping[int, str]:
        """The ranks that wait for no other while this one does, by their first numbers; none where not known."""
        return {self._peers[rank].first_rank: self._name(rank) for rank in self._stalled}

    def missing(self) -> Mapping[int, str]:
        """The ranks that have not come to a call of PyTorch's own, in which this one has waited to the limit.

        That is over on the others that wait there at nearly the same time. None is known where the board is stopped.
        """
        since = time.monotonic() - self._timeout.seconds
        self._timeout.expired = Wait(what="a call of torch.distributed", since=since, kind=COLLECTIVE, leads=False)
        time.sleep(_LEAVE_SECONDS)
        late = self._expired
        if self._rank in late:
            self._stalled = [rank for rank in range(len(self._peers)) if rank not in late]
        return self.stalled()

    def _run(self) -> None:
        while not self._closing.wait(self._answer_seconds / 8):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Announce a long wait or its end, and find out whether it can end."""
        oldest, long = self._timeout.oldest(), self._long
        if long and long.wait != oldest:
            if long.reported:
                _say(f"the wait in {long.wait.what} ended after {now - long.wait.since:.0f} s")
            long = None
        if oldest and long is None:
            long, self._stalled = _LongWait(wait=oldest, at=oldest.since + self._stall + self._answer_seconds), []
        self._long = long
        if self._works:
            try:
                self._exchange(now)
                # Begun in time to see which ranks repeat what they have announced.
                waits = self._waiting(now) if long and now >= long.at - _SILENT_SECONDS - _AGAIN_SECONDS else None
            except RuntimeError:
                # The connections of the wait itself report what has happened to the other ranks.
                self._works, waits = False, None
            if long and waits and now >= long.at:
                long.at = now + max(self._stall, _LOOK_AGAIN_SECONDS)
                self._name_stalled(long, waits)
        if oldest and oldest.blocked:
            if self._error:
                self._give_up(self._error)
            if now - oldest.since > self._timeout.seconds:
                self._give_up(self._timeout.out_of_time(oldest.what))

    def _exchange(self, now: float) -> None:
        self._board.receive()
        oldest = self._timeout.oldest()
        self._announce(self._timeout.leading() or oldest or self._timeout.expired, oldest, now)
        if self._own is None:
            return
        self._error = self._error or self._board.error()
        if self._rank == 0 and self._error is None:
            waits = self._board.read()
            if len(waits) == len(self._peers) and (error := self._judge.judge(waits, self._name)):
                self._board.end_waits(error)
        if self._timeout.expired:
            self._expired = set(self._board.read())

    def _announce(self, wait: Wait | None, oldest: Wait | None, now: float) -> None:
        if wait != self._wait:
            if self._own:
                self._board.announce(None)
            self._wait, self._own = wait, None
            self._number += 1
        if wait is None:
            return
        seconds = now - (oldest or wait).since
        if self._own is None:
            if now - wait.since <= self._announce_seconds:
                return
            place = self._place(wait)
            self._own = Announced(number=self._number, times=0, place=place, seconds=seconds, leads=wait.leads)
        # The first of two polls may have begun before the last announcement.
        elif now >= self._next and (wait.blocked or wait.polls >= self._polls + 2):
            self._own = replace(self._own, times=self._own.times + 1, seconds=seconds)
        else:
            return
        self._next, self._polls = now + _AGAIN_SECONDS, wait.polls
        self._board.announce(self._own)

    def _place(self, wait: Wait) -> WaitPlace:
        return WaitPlace(
            kind=wait.kind,
            what=wait.what,
            passes=self._passes(),
            line=script_line(),
            left=left_at(),
            blocked=wait.blocked,
        )

    # Stalled ranks.

    def _name_stalled(self, long: _LongWait, waits: Mapping[int, Announced]) -> None:
        """Find the ranks that do not wait. The lowest waiting rank names those that it has not named yet."""
        self._stalled = [rank for rank in range(len(self._peers)) if rank not in waits]
        new = [rank for rank in self._stalled if rank not in long.named]
        first_time = not long.named and not long.reported
        long.named.update(new)
        iteration, where = reports.iteration(), self._where(waits)
        seconds = max(wait.seconds for wait in waits.values())
        if self._rank == min(waits) and (new or first_time):
            long.reported = True
            if new:
                step = "" if iteration is None else f" of step {iteration}"
                _say(
                    f"{abbreviated([*map(self._name, new)], 2 * _LOOKS)} stalled: the others have been waiting up to "
                    f"{seconds:.0f} s in {where}{step}\n"
                    f"  the run continues when they arrive, and ends after {TIMEOUT.name}={self._timeout.seconds:g} s"
                )
            else:
                _say(f"every rank has been waiting for others, for up to {seconds:.0f} s: {where}")
        own = self._peers[self._rank]
        reported = [self._peers[rank] for rank in new if self._rank == self._reporter(rank, waits)]
        for number, peer in enumerate(reported):
            # On a host that hangs, all are in the same state.
            here = number < _LOOKS and (peer.host, peer.namespace) == (own.host, own.namespace)
            state = request_stack(peer.host, peer.pid, peer.started) if here else ""
            if state:
                tell(f"  rank {peer.first_rank}: {state}")
            stall = StallEvent(
                rank=peer.first_rank,
                host=peer.host,
                iteration=iteration,
                waiting_for=where,
                seconds=seconds,
                state=state,
            )
            try:
                reports.record(stall)
            except HpctrainError as error:
                _say(str(error))

    def _waiting(self, now: float) -> dict[int, Announced]:
        """What the waiting ranks have announced, without those that have been silent for too long."""
        before, self._heard = self._heard, {}
        for rank, wait in self._board.read().items():
            known = before.get(rank)
            self._heard[rank] = known if known and known[0] == wait else (wait, now)
        return {rank: wait for rank, (wait, since) in self._heard.items() if now - since <= _SILENT_SECONDS}

    def _reporter(self, rank: int, waiting: Iterable[int]) -> int:
        """The waiting rank that reports a stalled one: the lowest on its host, else the lowest of all."""
        host = self._peers[rank].host
        ranks = sorted(waiting)
        return next((each for each in ranks if self._peers[each].host == host), ranks[0])

    def _give_up(self, error: HpctrainError) -> None:
        if reports.give_up:
            reports.give_up(error)
        _say(str(error))
        # mpirun drops what it has not passed on when it ends the ranks.
        time.sleep(_FORWARD_SECONDS)
        end_job(error.exit_code)

    def _name(self, rank: int) -> str:
        return str(self._peers[rank])

    def _where(self, waits: Mapping[int, Announced]) -> str:
        """The collective that the ranks wait in; by rank if they wait in different ones."""
        by_what: dict[str, list[int]] = {}
        for rank, wait in waits.items():
            by_what.setdefault(wait.place.what, []).append(self._peers[rank].first_rank)
        if len(by_what) == 1:
            return next(iter(by_what))
        return "; ".join(f"{what} (rank {', '.join(map(str, ranks[:8]))})" for what, ranks in by_what.items())


def _say(text: str) -> None:
    tell(f"hpctrain: {text}")

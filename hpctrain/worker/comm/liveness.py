"""Knows which ranks wait and which do not: one thread of each rank watches its waits, and announces those that last.

A rank that waits announces where, and again every two seconds. It takes a few bytes, and only where a run stands still.
Two answers follow:

* A rank has waited for ``HPCTRAIN_STALL`` seconds. Those that have announced no wait are stalled: stopped,
  or busy with something else. The lowest waiting rank says so, and the lowest one on the same host reports what can be
  learnt there about the process. The stalled rank need not cooperate. Where all ranks wait, in different places, the
  lowest one names the places.
* The limit of a wait is over: its error names the stalled ranks, or those that wait elsewhere.

Waits of the control plane, of hpctrain's engines and of Horovod's reductions are watched. A rank that waits in a call
of PyTorch's own over Gloo or NCCL does not count as waiting: their own limits hold there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.common.errors import HpctrainError, abbreviated
from hpctrain.common.run.events.kinds import StallEvent
from hpctrain.common.settings import TIMEOUT, stall_seconds
from hpctrain.common.stderr import tell
from hpctrain.worker.comm.boards import Announced, Board
from hpctrain.worker.comm.rank_run import end_job
from hpctrain.worker.comm.script_location import remedy, script_place
from hpctrain.worker.comm.stalls import reports, request_stack
from hpctrain.worker.comm.timeout import Timeout, Wait

# A wait is announced after this time at most, and again so often. Waits that end sooner cost nothing.
_ANNOUNCE_SECONDS, _AGAIN_SECONDS = 1.0, 2.0
# How long to wait for the announcements of other ranks; ranks that share a core may need most of it.
_ANSWER_SECONDS = 2.0
# A rank that has not repeated its announcement for so long does not wait any more, but is stopped.
_SILENT_SECONDS = 8.0
# The time until the stalled ranks of a lasting wait are looked for again.
_LOOK_AGAIN_SECONDS = 10.0
# How many stalled ranks are inspected at most.
_LOOKS = 4
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


class LivenessWatch:
    """Watches the waits of this rank, and tells which ranks it waits for in vain.

    Args:
        peers: all ranks of the board, in order.
        passes: gives how many backward passes this rank has begun.

    Attributes:
        awaited: the ranks that this one waits for in vain: who, and where they wait themselves; none where not known.
    """

    def __init__(
        self, board: Board, timeout: Timeout, rank: int, peers: Sequence[Peer], passes: Callable[[], int]
    ) -> None:
        self._board, self._timeout = board, timeout
        self._rank, self._peers = rank, peers
        self._passes = passes
        self._stall = stall_seconds()
        self._answer_seconds = min(_ANSWER_SECONDS, self._stall / 2)
        self._announce_seconds = min(_ANNOUNCE_SECONDS, self._stall / 4)
        self.awaited: list[str] = []
        self._works = board.works
        # The longest wait; whether it was announced, and when to do so again.
        self._wait: Wait | None = None
        self._announced, self._announce_at = False, 0.0
        # When to look for stalled ranks in it, those named so far, and whether any was reported.
        self._look_at, self._named, self._reported = 0.0, set[int](), False
        # What each rank has announced last, and since when.
        self._heard: dict[int, tuple[Announced, float]] = {}
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

    def _run(self) -> None:
        while not self._closing.wait(self._answer_seconds / 8):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Announce a long wait or its end, and find out for whom this rank waits."""
        wait = self._timeout.oldest()
        if self._works:
            try:
                self._exchange(wait, now)
            except RuntimeError:
                # The connections of the wait itself report what has happened to the other ranks.
                self._works = False
        if wait and wait.blocked and now - wait.since > self._timeout.seconds:
            self._give_up(self._timeout.out_of_time(wait.what))

    def _exchange(self, wait: Wait | None, now: float) -> None:
        self._board.receive()
        if wait != self._wait:
            self._begin(wait, now)
        if wait is None:
            return
        if now >= self._announce_at:
            place = script_place(wait.what, ended=self._timeout.leaving, passes=self._passes())
            self._board.announce(Announced(place, now - wait.since))
            self._announced, self._announce_at = True, now + _AGAIN_SECONDS
        # Begun in time to see which ranks repeat what they have announced.
        if now >= self._look_at - _SILENT_SECONDS - _AGAIN_SECONDS:
            waits = self._waiting(now)
            if waits and now >= self._look_at:
                self._look_at = now + max(self._stall, _LOOK_AGAIN_SECONDS)
                self._name_awaited(waits)

    def _begin(self, wait: Wait | None, now: float) -> None:
        if self._wait and self._reported:
            _say(f"the wait in {self._wait.what} ended after {now - self._wait.since:.0f} s")
        if self._announced:
            self._board.announce(None)
        self._wait, self._announced = wait, False
        self._named, self._reported = set(), False
        if wait:
            self.awaited = []
            self._announce_at = wait.since + self._announce_seconds
            self._look_at = wait.since + self._stall + self._answer_seconds

    def _name_awaited(self, waits: Mapping[int, Announced]) -> None:
        """Find the ranks that do not wait. The lowest waiting rank names those that it has not named yet."""
        stalled = [rank for rank in range(len(self._peers)) if rank not in waits]
        self.awaited = [str(self._peers[rank]) for rank in stalled]
        if not stalled:
            own_place = waits[self._rank].place
            elsewhere = {rank: wait.place for rank, wait in waits.items() if wait.place != own_place}
            self.awaited = [f"{self._peers[rank]}, in {place}," for rank, place in elsewhere.items()]
        new = [rank for rank in stalled if rank not in self._named]
        names = abbreviated([str(self._peers[rank]) for rank in new], 2 * _LOOKS)
        self._named.update(new)
        iteration, where = reports.iteration(), self._where(waits)
        seconds = max(wait.seconds for wait in waits.values())
        if self._rank == min(waits) and (new or not (stalled or self._reported)):
            self._reported = True
            if new:
                step = "" if iteration is None else f" of step {iteration}"
                _say(
                    f"{names} stalled: the others have been waiting up to {seconds:.0f} s in {where}{step}\n"
                    f"  the run continues when they arrive, and ends after {TIMEOUT.name}={self._timeout.seconds:g} s"
                )
            else:
                hint = remedy([where])
                _say(f"every rank has been waiting for others, for up to {seconds:.0f} s: {where}\n  {hint}")
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
        return next((other for other in ranks if self._peers[other].host == host), ranks[0])

    def _give_up(self, error: HpctrainError) -> None:
        if reports.give_up:
            reports.give_up(error)
        _say(str(error))
        # mpirun drops what it has not passed on when it ends the ranks.
        time.sleep(_FORWARD_SECONDS)
        end_job(error.exit_code)

    def _where(self, waits: Mapping[int, Announced]) -> str:
        """What the ranks wait in; by rank if they wait in different places."""
        ranks_in: dict[str, list[int]] = {}
        for rank, wait in waits.items():
            ranks_in.setdefault(wait.place, []).append(self._peers[rank].first_rank)
        if len(ranks_in) == 1:
            return next(iter(ranks_in))
        shown = [f"{place} (rank {', '.join(map(str, ranks[:8]))})" for place, ranks in ranks_in.items()]
        return "; ".join(shown[: 2 * _LOOKS])


def _say(text: str) -> None:
    tell(f"hpctrain: {text}")

"""Finds the ranks that others wait for: a failure detector among the waiting ranks, started by one that waits long.

A thread of each rank watches its waits. A rank that has waited for ``HPCTRAIN_STALL`` seconds probes every other. Ranks
that wait too answer, and send probes of their own, so that all of them soon know which rank did not answer: one that is
stopped, swapped out, or busy with something else. The lowest waiting rank says so, and the lowest one on the same host
reports what can be learnt there about the process. The stalled rank itself need not cooperate. A probe is one message
of a few bytes to each rank, and is only sent when a run stands still anyway.

The detector watches the waits of the control plane and of the MPI engine. A rank that waits inside Horovod or
torch.distributed does not count as waiting: their own limits hold there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpctrain.common.errors import HpctrainError
from hpctrain.common.settings import TIMEOUT, stall_seconds
from hpctrain.common.stderr import tell
from hpctrain.worker.comm.deadlocks import MESSAGES, DeadlockDetector, WaitPlace, deadlock_error
from hpctrain.worker.comm.polled import allgather, duplicate
from hpctrain.worker.comm.stacks import Process, look_at
from hpctrain.worker.comm.stall_reports import Stall, reports
from hpctrain.worker.comm.timeout import END, Timeout, Wait

if TYPE_CHECKING:
    from mpi4py import MPI

# How long to wait for answers; ranks that share a core may need most of it.
_ANSWER_SECONDS = 2.0
# The time until a lasting wait is probed again.
_AGAIN_SECONDS = 10.0
# How many stalled ranks are inspected at most. On a host that hangs, all are in the same state.
_LOOKS = 4
# How long the last line of a run may take to mpirun.
_FORWARD_SECONDS = 0.5
_TAG = 1


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A rank: its number at the start of the run, which messages use, its host and its process."""

    first_rank: int
    host: str
    process: Process


@dataclass(kw_only=True)
class _Probe:
    """The probes of one wait.

    Attributes:
        at: when the next probe begins.
        number: the number of the last probe, 0 before the first.
        due: when the answers have to be there.
        answers: where each waiting rank waits, and for how many seconds.
        named: all ranks found stalled so far in this wait.
        reported: whether this rank has reported a stall in this wait.
    """

    wait: Wait
    at: float
    number: int = 0
    due: float = float("inf")
    answers: dict[int, tuple[WaitPlace, float]] = field(default_factory=dict)
    stalled: list[int] = field(default_factory=list)
    named: set[int] = field(default_factory=set)
    reported: bool = False


class FailureDetector:
    """Watches the waits of this rank. Creating and closing it is collective over ``world``.

    Args:
        passes: gives how many backward passes this rank has begun.
    """

    def __init__(
        self, world: MPI.Intracomm, timeout: Timeout, member: Peer, passes: Callable[[], int] = lambda: 0
    ) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = duplicate(world, timeout, "starting the failure detector")
        self._timeout = timeout
        self._members = allgather(self._comm, timeout, member, "starting the failure detector")
        self._stall = stall_seconds()
        self._answer_seconds = min(_ANSWER_SECONDS, self._stall / 2)
        self._sent: list[MPI.Request] = []
        self._probes = 0
        self._probe: _Probe | None = None
        self._probed_by: dict[int, int] = {}
        # After a rank's death MPI's calls fail here, and the re-formed run makes a new detector.
        self._mute = MPI.Query_thread() != MPI.THREAD_MULTIPLE
        self._closing = threading.Event()
        timeout.stalled = self._names
        self._deadlocks = DeadlockDetector(self._comm.rank, self._comm.size, self._send, self._name, passes)
        timeout.deadlock = lambda: self._deadlocks.error
        self._thread = threading.Thread(target=self._watch_waits, name="hpctrain-stalls", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Receive all messages that were sent, and stop. Collective."""
        self._timeout.finish(self._comm.Ibarrier, "shutdown")
        self.abandon()
        self._timeout.wait(self._all_sent, "shutdown")
        # From here on no rank sends, but messages of others may still have to be received.
        request = self._comm.Ibarrier()
        self._timeout.wait(lambda: self._receive() and bool(request.Test()), "shutdown")
        self._comm.Free()

    def abandon(self) -> None:
        """Stop watching without the others, and leave the communicator to MPI. Idempotent."""
        self._closing.set()
        self._thread.join()
        # A later detector may have replaced it already.
        if self._timeout.stalled == self._names:
            self._timeout.stalled = dict

    def _watch_waits(self) -> None:
        while not self._closing.wait(self._answer_seconds / 8):
            try:
                self._watch(time.monotonic())
            except self._mpi.Exception:
                self._mute = True

    def _watch(self, now: float) -> None:
        probe, wait = self._probe, self._timeout.oldest()
        if probe and probe.wait != wait:
            self._probe = None
            if probe.reported:
                _say(f"the wait in {probe.wait.what} ended after {now - probe.wait.since:.0f} s")
        if wait and self._probe is None:
            self._probe = _Probe(wait=wait, at=wait.since + self._stall)
        if not self._mute:
            self._receive()
            self._proceed(now)
            self._deadlocks.look(self._timeout.leading(), now)
        if wait and wait.blocked and self._deadlocks.error:
            self._give_up(self._deadlocks.error)
        if wait and wait.blocked and now - wait.since > self._timeout.seconds:
            self._give_up(self._timeout.out_of_time(wait.what))

    def _proceed(self, now: float) -> None:
        probe = self._probe
        if probe is None:
            return
        for rank, number in self._probed_by.items():
            self._send(rank, "wait", number, self._deadlocks.place_of(probe.wait), now - probe.wait.since)
        self._probed_by.clear()
        if now >= probe.at:
            self._probes += 1
            probe.number, probe.answers = self._probes, {}
            probe.at, probe.due = now + max(self._stall, _AGAIN_SECONDS), now + self._answer_seconds
            for rank in self._others():
                self._send(rank, "probe", probe.number)
        if now >= probe.due:
            probe.due = float("inf")
            self._evaluate(probe, now)

    def _evaluate(self, probe: _Probe, now: float) -> None:
        """Evaluate the answers of a probe. The lowest waiting rank names newly stalled ranks."""
        waiting = sorted([self._comm.rank, *probe.answers])
        probe.stalled = [rank for rank in self._others() if rank not in probe.answers]
        new = [rank for rank in probe.stalled if rank not in probe.named]
        first_time = not probe.named and not probe.reported
        probe.named.update(new)
        iteration, seconds, waits = reports.iteration(), self._longest(probe, now), self._waits(probe)
        if self._comm.rank == waiting[0] and (new or first_time):
            probe.reported = True
            if new:
                _say(self._headline(new, iteration, seconds, waits))
            else:
                _say(f"every rank has been waiting for others, for up to {seconds:.0f} s: {waits}")
        if self._comm.rank == waiting[0] and not probe.stalled:
            self._end_waits_for_ended_ranks(probe, now)
        own = [rank for rank in new if self._comm.rank == self._reporter(rank, waiting)]
        for place, rank in enumerate(own):
            # On a host that hangs, all are in the same state.
            here = place < _LOOKS and self._members[rank].host == self._members[self._comm.rank].host
            state, stack = look_at(self._members[rank].process) if here else ("", "")
            first_rank, host = self._members[rank].first_rank, self._members[rank].host
            self._report(
                Stall(
                    rank=first_rank,
                    host=host,
                    iteration=iteration,
                    waiting_for=waits,
                    seconds=seconds,
                    state=state,
                    stack=stack,
                )
            )

    def _end_waits_for_ended_ranks(self, probe: _Probe, now: float) -> None:
        """Raise an error in all waits where ranks have waited long, in groups too, and one has ended its script.

        That one calls no collective any more, and no rank is left outside of a wait for which the others may wait.
        """
        own = self._deadlocks.place_of(probe.wait), now - probe.wait.since
        waits = {self._comm.rank: own, **probe.answers}
        if all(seconds >= self._stall for place, seconds in waits.values() if place.kind != END):
            places = {rank: place for rank, (place, _) in waits.items()}
            error = deadlock_error(places, self._name) if any(place.kind == END for place in places.values()) else None
            if error:
                self._deadlocks.end_waits(error)

    def _reporter(self, rank: int, waiting: Sequence[int]) -> int:
        """The waiting rank that reports a stalled one: the lowest on its host, else the lowest of all."""
        host = self._members[rank].host
        return next((each for each in waiting if self._members[each].host == host), waiting[0])

    def _headline(self, stalled: Sequence[int], iteration: int | None, seconds: float, waits: str) -> str:
        names = ", ".join(map(self._name, stalled[: 2 * _LOOKS]))
        more = f" and {len(stalled) - 2 * _LOOKS} more" if len(stalled) > 2 * _LOOKS else ""
        step = "" if iteration is None else f" of step {iteration}"
        return (
            f"{names}{more} stalled: the others have been waiting up to {seconds:.0f} s in {waits}{step}\n"
            f"  the run continues when they arrive, and ends after {TIMEOUT.name}={self._timeout.seconds:g} s"
        )

    def _report(self, stall: Stall) -> None:
        if stall.state:
            lines = [f"  rank {stall.rank}: {stall.state}", *(f"    {line}" for line in stall.stack.splitlines())]
            tell("\n".join(lines))
        try:
            reports.record(stall)
        except HpctrainError as error:
            _say(str(error))

    def _give_up(self, error: HpctrainError) -> None:
        if reports.give_up:
            reports.give_up(error)
        _say(str(error))
        # mpirun drops what it has not passed on when it ends the ranks.
        time.sleep(_FORWARD_SECONDS)
        self._mpi.COMM_WORLD.Abort(error.exit_code)

    # Names for messages.

    def _names(self) -> Mapping[int, str]:
        probe = self._probe
        return {self._members[rank].first_rank: self._name(rank) for rank in probe.stalled} if probe else {}

    def _name(self, rank: int) -> str:
        return f"rank {self._members[rank].first_rank} on {self._members[rank].host}"

    def _waits(self, probe: _Probe) -> str:
        """The collective that the ranks wait in; by rank if they wait in different ones."""
        by_what: dict[str, list[int]] = {probe.wait.what: [self._members[self._comm.rank].first_rank]}
        for rank, (place, _) in sorted(probe.answers.items()):
            by_what.setdefault(place.what, []).append(self._members[rank].first_rank)
        if len(by_what) == 1:
            return probe.wait.what
        return "; ".join(f"{what} (rank {', '.join(map(str, ranks[:8]))})" for what, ranks in by_what.items())

    def _longest(self, probe: _Probe, now: float) -> float:
        return max(now - probe.wait.since, *(seconds for _, seconds in probe.answers.values()), 0.0)

    # Messages.

    def _others(self) -> Iterable[int]:
        return (rank for rank in range(self._comm.size) if rank != self._comm.rank)

    def _send(self, rank: int, *message: Any) -> None:
        self._sent.append(self._comm.isend(message, rank, tag=_TAG))

    def _all_sent(self) -> bool:
        self._receive()
        return not self._sent

    def _receive(self) -> bool:
        """Handle all messages that have arrived. Returns True."""
        self._sent = [request for request in self._sent if not request.Test()]
        status = self._mpi.Status()
        while message := self._comm.improbe(tag=_TAG, status=status):
            self._handle(status.Get_source(), *message.recv())
        return True

    def _handle(self, source: int, kind: str, *values: Any) -> None:
        probe = self._probe
        if kind in MESSAGES:
            self._deadlocks.receive(source, kind, *values)
        if kind == "probe":
            # Answered once this rank waits. The probe also makes a rank that has not probed yet probe at once.
            self._probed_by[source] = values[0]
            if probe and not probe.number:
                probe.at = time.monotonic()
        if probe is None or self._closing.is_set():
            return
        if kind == "wait" and values[0] == probe.number:
            probe.answers[source] = values[1:]


def _say(text: str) -> None:
    tell(f"hpctrain: {text}")

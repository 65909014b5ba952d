"""Hands a run's events to a tracker as they are written, and keeps what it cannot take yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event, EventsFile, parse_event
from hpctrain.common.run.events.kinds import StartEvent
from hpctrain.common.run.events.reader import Kept, ScriptSaves
from hpctrain.control.supervision.follow import Tail
from hpctrain.report.tracking.curves import Curves, Point
from hpctrain.report.tracking.progress import TrackerProgress

_PAUSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 60.0
_DOUBLINGS = 10
# A tracker that took longer than this to fail is not tried again when the run has ended.
_SLOW_SECONDS = 5.0
# Bytes read at a time: some thousand events, which take some MB as models.
_PART_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class NewEvent:
    """One event for a tracker.

    Attributes:
        number: its line in the file, from 1.
        point: the point of its values; None for an event without a value.
        needed: the iteration that a checkpoint must have reached for the event to count after a resume.
    """

    number: int
    event: Event
    point: Point | None
    needed: int


class Tracking(Protocol):
    """One run at a tracker. Exceptions other than HpctrainError are taken for faults that pass.

    Attributes:
        rewrites: whether it can forget what was lost with a resume; it is then given all that counts anew.
        place: what a message names when it fails.
    """

    rewrites: bool
    place: str

    def open(self) -> TrackerProgress:
        """Find or make the run there, empty where it rewrites. Returns what the tracker already has.

        Called first, after an error of any method, and at each resume where it rewrites.
        """

    def send(self, entries: Sequence[NewEvent]) -> None:
        """Hand over events, in order. After an error :meth:`open` is called, and what is then missing is sent."""

    def close(self) -> None:
        """End what :meth:`open` began."""


class Backlog:
    """The events that a tracker does not have yet, without those that a resume undid before they were sent.

    They are read in parts from the beginning of the run's file, each of which is to be sent before the next one.

    Args:
        damaged: gets what is wrong with a line that is no event, which is passed over.

    Attributes:
        entries: the events that were read and are to be sent.
        more: whether there may be another part.

    Raises:
        HpctrainError: the file cannot be read.
    """

    def __init__(self, directory: RunDirectory, has: TrackerProgress, damaged: Callable[[HpctrainError], None]) -> None:
        self.entries: list[NewEvent] = []
        self.more = True
        self._number = 0
        self._has = has
        self._damaged = damaged
        self._last: float | None = None
        self._path = directory.events
        self._tail = Tail(directory.events, whole=True)
        self._curves = Curves()
        events = EventsFile(directory.events, damaged)
        self._kept, self._known = Kept(events), events.lines
        self._saves = ScriptSaves()

    @property
    def fits(self) -> bool:
        """Whether the file still has what the tracker has: a crash of the machine can lose the newest lines."""
        return self._last == self._has.time

    def read(self) -> bool:
        """Read the next events; returns whether an attempt has begun that undoes some that may have been sent."""
        again = False
        lines = self._tail.lines(at_most=_PART_BYTES)
        self.more = bool(lines)
        for line in lines:
            # A crash of the machine leaves zeros in a line, which the next attempt removes.
            if b"\0" in line:
                continue
            self._number += 1
            try:
                event = parse_event(line, f"{self._path}:{self._number}")
            except HpctrainError as error:
                self._damaged(error)
                continue
            if self._number == self._has.sent:
                self._last = event.time
            counts, point = self._kept.keeps(event), self._curves.point(event)
            # What the attempts up to now undo is known from the beginning, and never becomes an entry.
            if isinstance(event, StartEvent) and self._number > self._known:
                again |= self._number > 1
                self.entries = [entry for entry in self.entries if entry.needed <= event.iteration]
            if counts and self._number > self._has.sent:
                self.entries.append(NewEvent(number=self._number, event=event, point=point, needed=self._kept.needed))
            if self._saves.at(event):
                self.entries = [replace(entry, needed=0) for entry in self.entries]
        return again

    def catch_up(self) -> None:
        """Skip what the tracker already has."""
        while self.more and self._number <= self._has.sent:
            self.read()


def follow(
    directory: RunDirectory,
    tracking: Tracking,
    *,
    ended: Callable[[float], bool],
    say: Callable[[str], None],
    describe: Callable[[Exception], str] = str,
) -> bool:
    """Send events to a tracker until the run has ended.

    Args:
        ended: waits up to this many seconds, and returns whether the run has ended.
        say: prints a message for the user when the tracker begins to fail, and when it is back.
        describe: an exception in words, without secrets.

    Returns:
        Whether the tracker has all of them.

    Raises:
        HpctrainError: the run's own files cannot be read or written.
    """
    follower = _Follower(directory, tracking, say)
    last = False
    while True:
        began = time.monotonic()
        try:
            follower.turn()
        except HpctrainError:
            raise
        # The libraries document no list of what they raise, and a tracker's fault must not fail the run.
        except Exception as error:
            took = time.monotonic() - began
            if not follower.failures:
                failure = f"{tracking.place} fails ({describe(error)})"
                say(f"{failure}; nothing waits for it, and what is missing is sent later")
            follower.failed()
            if last or (took > _SLOW_SECONDS and ended(0)):
                return False
        else:
            if follower.failures:
                say("is back, and has all that was missing")
                follower.failures = 0
            if last:
                return True
        last = ended(min(_PAUSE_SECONDS * 2 ** min(follower.failures, _DOUBLINGS), _LONGEST_PAUSE_SECONDS))


class _Follower:
    """Reads and sends events; ``failures`` counts the tracker's failures in a row."""

    def __init__(self, directory: RunDirectory, tracking: Tracking, say: Callable[[str], None]) -> None:
        self.failures = 0
        self._say = say
        self._said_damaged = False
        self._directory = directory
        self._tracking = tracking
        self._backlog: Backlog | None = None

    def failed(self) -> None:
        """Ask the tracker at the next turn what it has: it may have taken a part, or lost what it had."""
        self.failures += 1
        self._backlog = None

    def turn(self) -> None:
        """Send all new events."""
        more = True
        while more:
            if self._backlog is None or (self._backlog.read() and self._tracking.rewrites):
                self._begin()
            assert self._backlog is not None
            if self._backlog.entries:
                self._tracking.send(self._backlog.entries)
                self._backlog.entries = []
            more = self._backlog.more

    def _damaged(self, error: HpctrainError) -> None:
        if not self._said_damaged:
            self._said_damaged = True
            self._say(f"warning: {error.message}; it is passed over, as are others like it")

    def _begin(self) -> None:
        self._backlog = None
        has = self._tracking.open()
        backlog = Backlog(self._directory, has, self._damaged)
        backlog.catch_up()
        if not backlog.fits:
            backlog = Backlog(self._directory, has.model_copy(update={"sent": 0, "time": None}), self._damaged)
            backlog.catch_up()
        self._backlog = backlog

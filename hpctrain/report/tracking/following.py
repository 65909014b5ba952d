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
from hpctrain.report.tracking.progress import Progress

_PAUSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 60.0
_DOUBLINGS = 10
# A tracker that took as long to fail once does not get a last chance when the run has ended.
_SLOW_SECONDS = 5.0
# Read at a time: some thousand events, which have some MB as models.
_PART_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One event for a tracker.

    Attributes:
        number: its line in the file, from 1.
        event: itself.
        point: of its values; None for one without.
        needed: the iteration that a checkpoint must have reached for it to count after a resume.
    """

    number: int
    event: Event
    point: Point | None
    needed: int


class Tracking(Protocol):
    """One run at a tracker. What its library raises is taken for a fault that passes, but for HpctrainError.

    Attributes:
        rewrites: it can forget what was lost with a resume, and is given all that counts anew.
    """

    rewrites: bool

    def open(self) -> Progress:
        """Find or make the run there; where it rewrites, without what it had. Returns what it has already.

        Called first, after an error of any method, and where it rewrites, at each resume.
        """

    def send(self, entries: Sequence[Entry]) -> None:
        """Hand over events, in order. An error is followed by :meth:`open`, and by what the tracker then lacks."""

    def close(self) -> None:
        """End what :meth:`open` began."""


class Backlog:
    """The events that a tracker does not have yet, without those that were lost before it got them.

    They are read in parts, each of which is to be handed over before the next one.

    Args:
        directory: the run, whose file of events is read from its beginning.
        has: what the tracker has.

    Attributes:
        entries: those that were read.
        more: whether the last part was not the last one.

    Raises:
        HpctrainError: the file cannot be read.
    """

    def __init__(self, directory: RunDirectory, has: Progress) -> None:
        self.entries: list[Entry] = []
        self.more = True
        self._number = 0
        self._has = has
        self._last: float | None = None
        self._path = directory.events
        self._tail = Tail(directory.events, whole=True)
        self._curves = Curves()
        events = EventsFile(directory.events)
        self._kept, self._known = Kept(events), events.lines
        self._saves = ScriptSaves()

    @property
    def fits(self) -> bool:
        """Whether the file still has what the tracker has; a crash of the machine can take the newest lines."""
        return self._last == self._has.time

    def read(self) -> bool:
        """Take in the next events; returns whether an attempt has begun that undoes what may have been handed over.

        Raises:
            HpctrainError: a line is not an event.
        """
        again = False
        lines = self._tail.lines(at_most=_PART_BYTES)
        self.more = bool(lines)
        for line in lines:
            # What such a crash leaves of a line, and the next attempt removes.
            if b"\0" in line:
                continue
            self._number += 1
            event = parse_event(line, f"{self._path}:{self._number}")
            if self._number == self._has.sent:
                self._last = event.time
            counts, point = self._kept.keeps(event), self._curves.point(event)
            # What earlier ones undo is known from the beginning, and is left out.
            if isinstance(event, StartEvent) and self._number > self._known:
                again |= self._number > 1
                self.entries = [entry for entry in self.entries if entry.needed <= event.iteration]
            if counts and self._number > self._has.sent:
                self.entries.append(Entry(number=self._number, event=event, point=point, needed=self._kept.needed))
            if self._saves.at(event):
                self.entries = [replace(entry, needed=0) for entry in self.entries]
        return again

    def catch_up(self) -> None:
        """Pass over what the tracker has.

        Raises:
            HpctrainError: a line is not an event.
        """
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
    """Hand over events until the run has ended.

    Args:
        directory: the run.
        tracking: gets them.
        ended: waits so many seconds at most, and says whether nobody writes any more.
        say: gets what the user has to know: that the tracker fails, once, and that it is back.
        describe: the fault of an exception, in words that all may read.

    Returns:
        Whether the tracker has all of them.

    Raises:
        HpctrainError: the run's own files cannot be read or written.
    """
    follower = _Follower(directory, tracking)
    last = False
    while True:
        began = time.monotonic()
        try:
            follower.turn()
        except HpctrainError:
            raise
        # Nobody knows all that the libraries raise, and a tracker's fault is no fault of the run.
        except Exception as error:
            took = time.monotonic() - began
            if not follower.failures:
                say(f"{describe(error)}; nothing waits for it, and what is missing is sent later")
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
    """Reads and hands over; ``failures`` is how often in a row the tracker failed."""

    def __init__(self, directory: RunDirectory, tracking: Tracking) -> None:
        self.failures = 0
        self._directory = directory
        self._tracking = tracking
        self._backlog: Backlog | None = None

    def failed(self) -> None:
        """Begin anew at the next turn, with what the tracker has by then: who knows what it took, or forgot."""
        self.failures += 1
        self._backlog = None

    def turn(self) -> None:
        """Hand over all that is new."""
        more = True
        while more:
            if self._backlog is None or (self._backlog.read() and self._tracking.rewrites):
                self._begin()
            assert self._backlog is not None
            if self._backlog.entries:
                self._tracking.send(self._backlog.entries)
                self._backlog.entries = []
            more = self._backlog.more

    def _begin(self) -> None:
        self._backlog = None
        has = self._tracking.open()
        backlog = Backlog(self._directory, has)
        backlog.catch_up()
        if not backlog.fits:
            backlog = Backlog(self._directory, has.model_copy(update={"sent": 0, "time": None}))
            backlog.catch_up()
        self._backlog = backlog

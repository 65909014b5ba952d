"""Sends a run's events to trackers: while the run goes on from a thread for each, or all of a recorded run."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, Self, TypeVar

from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import missing_extra, require_trackers
from hpctrain.common.files.printable import shell_word
from hpctrain.common.recipes.tracking import Tracker, parse_trackers
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event, EventsFile, kept

_PAUSE_SECONDS = 2.0
# How long trackers may take at the end of a run. The import of a library alone takes seconds where all cores are busy.
_END_SECONDS = 30.0
_POLL_SECONDS = 0.1
# The most events at a time: they take some MB as models.
_PART = 5000

Say = Callable[[str], None]
T = TypeVar("T")


class Tracking(Protocol):
    """One run at a tracker."""

    def send(self, events: Sequence[Event]) -> None:
        """Hand over the next events."""

    def close(self) -> None:
        """The run has ended, or all of it was handed over."""


def parts(values: Iterable[T], most: int) -> Iterator[list[T]]:
    """The values in lists of at most so many."""
    iterator = iter(values)
    while part := list(itertools.islice(iterator, most)):
        yield part


def _tracking(name: Tracker, directory: RunDirectory, say: Say, *, whole: bool) -> Tracking:
    """The tracker of that name. Its module is imported here, because each needs a package of its own.

    Args:
        whole: whether it gets all of the run, in place of what it has; otherwise what happens from now on.
    """
    try:
        match name:
            case "tensorboard":
                from hpctrain.report.tracking.tensorboard_files import TensorBoardFiles

                return TensorBoardFiles(directory, whole=whole)
            case "mlflow":
                from hpctrain.report.tracking.mlflow_run import MlflowRun

                return MlflowRun(directory, say)
            case "wandb":
                from hpctrain.report.tracking.wandb_run import WandbRun

                return WandbRun(directory, say)
    except ModuleNotFoundError as error:
        raise missing_extra(error) or error from error


def _described(error: Exception) -> str:
    """A library's exception without its text, which may quote an address with a password."""
    if isinstance(error, HpctrainError):
        return f"{error.message}: {error.hint}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(getattr(error, "error_code", None) or type(error).__name__)


def _send(name: Tracker, directory: RunDirectory, events: Iterable[Sequence[Event]], say: Say, *, whole: bool) -> bool:
    """Hand over parts of a run's events to a tracker; returns whether it took them.

    Raises:
        HpctrainError: the run's own files cannot be read, if it is a recorded run.
    """
    tracking: Tracking | None = None
    # The libraries document no list of what they raise, and a tracker's fault must not fail the run.
    try:
        for part in events:
            tracking = tracking or _tracking(name, directory, say, whole=whole)
            tracking.send(part)
        if tracking:
            tracking.close()
    except Exception as error:
        if whole and isinstance(error, HpctrainError):
            raise
        say(f"{name}: it gets no more of this run ({_described(error)})")
        return False
    return True


class _Feed(threading.Thread):
    """Sends the events of a run to one tracker as they come."""

    def __init__(self, name: Tracker, directory: RunDirectory, say: Say) -> None:
        # What hangs in a request must not keep the launcher.
        super().__init__(daemon=True)
        self.tracker = name
        self.has_all = False
        self.ended = threading.Event()
        self._directory = directory
        self._say = say
        self._events: deque[Event] = deque()
        self.start()

    def run(self) -> None:
        self.has_all = _send(self.tracker, self._directory, self._parts(), self._say, whole=False)

    def give(self, event: Event) -> None:
        if self.is_alive():
            self._events.append(event)

    def _parts(self) -> Iterator[list[Event]]:
        last = False
        while not last:
            last = self.ended.wait(_PAUSE_SECONDS)
            while part := [self._events.popleft() for _ in range(min(len(self._events), _PART))]:
                yield part


class Trackers:
    """The trackers of a run that goes on, which get its events within a block.

    Args:
        notice: prints a message for the user, from any thread.
        over: whether their end, which began at this time, has to be over.
    """

    def __init__(
        self,
        names: Sequence[Tracker],
        directory: RunDirectory,
        notice: Say,
        over: Callable[[float], bool] = lambda began: False,
    ) -> None:
        self._directory = directory
        self._notice = notice
        self._over = over
        self._feeds = [_Feed(name, directory, notice) for name in names]

    def __enter__(self) -> Self:
        return self

    def give(self, event: Event) -> None:
        """Send an event with the next ones."""
        for feed in self._feeds:
            feed.give(event)

    def __exit__(self, *raised: object) -> None:
        """Let them send the rest, all at the same time."""
        began = time.monotonic()
        for feed in self._feeds:
            feed.ended.set()
        for feed in self._feeds:
            while feed.is_alive() and time.monotonic() - began < _END_SECONDS and not self._over(began):
                feed.join(_POLL_SECONDS)
            if not feed.has_all:
                command = f"hpctrain report {shell_word(self._directory.path)} --tracking {feed.tracker}"
                self._notice(f"{feed.tracker} does not have all of this run, but its report has; later: {command}")


def send_later(run_dir: Path, names: str, notice: Say) -> int:
    """Send all of a run to trackers; returns the exit status: 0 if they now have it, else 1.

    Args:
        names: the trackers' names, with commas between them.
        notice: prints a message for the user.

    Raises:
        HpctrainError: an unknown name, no run, or a tracker's package or address is missing.
    """
    trackers = parse_trackers(names)
    require_trackers(trackers)
    run = RunDirectory(run_dir)
    if not run.events.exists():
        raise HpctrainError("HT-run-no-events", "{path} holds no events", "is this a run directory?", path=run.path)
    sent = [_send(name, run, parts(kept(EventsFile(run.events)), _PART), notice, whole=True) for name in trackers]
    return 0 if all(sent) else 1

"""Sends a run's events to trackers: while the run goes on from a thread for each, or all of a recorded run."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, Self, TypeVar

from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import missing_extra
from hpctrain.common.files.printable import shell_word
from hpctrain.common.recipes.tracking import Tracker, parse_trackers
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event, EventsFile, kept
from hpctrain.control.supervision.trackers import MLFLOW_SERVER, require_trackers
from hpctrain.report.tracking.redaction import secrets, without

_PAUSE_SECONDS = 2.0
# How long trackers may take at the end of a run. The import of a library alone takes seconds where all cores are busy.
_END_SECONDS = 30.0
# From then on the user is told what the command waits for.
_SILENT_SECONDS = 5.0
_POLL_SECONDS = 0.1
# The most events at a time: they take some MB as models.
_PART = 5000
# Characters of a library's message, whose beginning says what is wrong.
_LONGEST = 300

Say = Callable[[str], None]
T = TypeVar("T")


class Tracking(Protocol):
    """One run at a tracker.

    Attributes:
        place: what a message names when it fails.
    """

    place: str

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

                return MlflowRun(directory, say, whole=whole)
            case "wandb":
                from hpctrain.report.tracking.wandb_run import WandbRun

                return WandbRun(directory, say)
    except ModuleNotFoundError as error:
        raise missing_extra(error) or error from error


def _described(error: Exception) -> str:
    """A library's exception in words, without the secrets that it may quote."""
    code = getattr(error, "error_code", None)
    words = without(str(error), secrets(os.environ, os.environ.get(MLFLOW_SERVER))).split("\n")[0][:_LONGEST]
    return f"{code or type(error).__name__}: {words}"


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
    except HpctrainError as error:
        if whole:
            raise
        say(f"{name}: {error.message}: {error.hint}")
        return False
    except Exception as error:
        place = tracking.place if tracking else name
        rest = "" if whole else "; nothing waits for it, and it gets no more of this run"
        say(f"{name}: {place} fails ({_described(error)}){rest}")
        return False
    return True


class _Feed(threading.Thread):
    """Sends the events of a run to one tracker as they come.

    Attributes:
        messages: for the user, not printed yet.
        has_all: whether the tracker has taken all of them.
    """

    def __init__(self, name: Tracker, directory: RunDirectory) -> None:
        # What hangs in a request must not keep the launcher.
        super().__init__(daemon=True)
        self.tracker = name
        self.messages: deque[str] = deque()
        self.has_all = False
        self._directory = directory
        self._events: deque[Event] = deque()
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        self.has_all = _send(self.tracker, self._directory, self._parts(), self.messages.append, whole=False)

    def give(self, event: Event) -> None:
        if self.is_alive():
            self._events.append(event)

    def end(self) -> None:
        """Say that no more events come."""
        self._ended.set()

    def _parts(self) -> Iterator[list[Event]]:
        last = False
        while not last:
            last = self._ended.wait(_PAUSE_SECONDS)
            while part := [self._events.popleft() for _ in range(min(len(self._events), _PART))]:
                yield part


class Trackers:
    """The trackers of a run that goes on, which get its events within a block.

    Args:
        notice: prints a message for the user.
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
        self._feeds = [_Feed(name, directory) for name in names]

    def __enter__(self) -> Self:
        return self

    def give(self, event: Event) -> None:
        """Send an event with the next ones, and pass on what there is to say."""
        for feed in self._feeds:
            feed.give(event)
        self._look()

    def __exit__(self, *raised: object) -> None:
        """Let them send the rest, all at the same time."""
        began = time.monotonic()
        said = False
        for feed in self._feeds:
            feed.end()
        while waits := ", ".join(feed.tracker for feed in self._feeds if feed.is_alive()):
            waited = time.monotonic() - began
            if waited > _END_SECONDS or self._over(began):
                break
            if waited > _SILENT_SECONDS and not said:
                said = True
                self._notice(f"waiting for {waits} to take the rest of this run, {_END_SECONDS:.0f} s at most")
            self._look()
            time.sleep(_POLL_SECONDS)
        self._look()
        for feed in self._feeds:
            if not feed.has_all:
                command = f"hpctrain report {shell_word(self._directory.path)} --tracking {feed.tracker}"
                self._notice(f"{feed.tracker} does not have all of this run; it gets it by: {command}")

    def _look(self) -> None:
        for feed in self._feeds:
            while feed.messages:
                self._notice(feed.messages.popleft())


def send_later(run_dir: Path, names: str, notice: Say) -> int:
    """Send all of a run to trackers; returns the exit status: 0 if they now have it, else 1.

    Args:
        names: the trackers' names, with commas between them.
        notice: prints a message for the user.

    Raises:
        HpctrainError: an unknown name, no run, a damaged one, or a tracker's package or address is missing.
    """
    trackers = parse_trackers(names)
    require_trackers(trackers)
    run = RunDirectory(run_dir)
    if not run.events.exists():
        raise HpctrainError("HT-run-no-events", "{path} holds no events", "is this a run directory?", path=run.path)
    sent = [_send(name, run, parts(kept(EventsFile(run.events)), _PART), notice, whole=True) for name in trackers]
    return 0 if all(sent) else 1

"""Sends a run's events to trackers while the run goes on, from a thread for each."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, Self

from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import missing_extra
from hpctrain.common.recipes.tracking import Tracker
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event

_PAUSE_SECONDS = 2.0
# How long trackers may take at the end of a run. The import of a library alone takes seconds where all cores are busy.
_END_SECONDS = 30.0
_POLL_SECONDS = 0.1

Say = Callable[[str], None]


class Tracking(Protocol):
    """One run at a tracker."""

    def send(self, events: Sequence[Event]) -> None:
        """Hand over the next events."""

    def close(self) -> None:
        """The run has ended."""


def _tracking(name: Tracker, directory: RunDirectory, say: Say) -> Tracking:
    """The tracker of that name. Its module is imported here, because each needs a package of its own."""
    try:
        match name:
            case "tensorboard":
                from hpctrain.report.tracking.tensorboard_files import TensorBoardFiles

                return TensorBoardFiles(directory)
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


class _Feed(threading.Thread):
    """Sends the events of a run to one tracker as they come."""

    def __init__(self, name: Tracker, directory: RunDirectory, say: Say) -> None:
        # What hangs in a request must not keep the launcher.
        super().__init__(daemon=True)
        self.tracker = name
        self.ended = threading.Event()
        self._directory = directory
        self._say = say
        self._events: deque[Event] = deque()
        self.start()

    def run(self) -> None:
        tracking: Tracking | None = None
        # The libraries document no list of what they raise, and a tracker's fault must not fail the run.
        try:
            for events in self._parts():
                tracking = tracking or _tracking(self.tracker, self._directory, self._say)
                tracking.send(events)
            if tracking:
                tracking.close()
        except Exception as error:
            self._say(f"{self.tracker}: it gets no more of this run, but the report has all ({_described(error)})")

    def give(self, event: Event) -> None:
        if self.is_alive():
            self._events.append(event)

    def _parts(self) -> Iterator[list[Event]]:
        last = False
        while not last:
            last = self.ended.wait(_PAUSE_SECONDS)
            if part := [self._events.popleft() for _ in range(len(self._events))]:
                yield part


class Trackers:
    """The trackers of a run that goes on, which get its events within a block.

    Args:
        over: whether their end, which began at this time, has to be over.
    """

    def __init__(
        self,
        names: Sequence[Tracker],
        directory: RunDirectory,
        notice: Say,
        over: Callable[[float], bool] = lambda began: False,
    ) -> None:
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
            if feed.is_alive():
                self._notice(f"{feed.tracker} took too long and does not have all of this run, but the report has")

"""Signals to the launcher: collected while ranks run, and an exception while there is nothing to stop in good order."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

from hpctrain.common.run.stopping import STOP_SIGNALS

# The signals that request a stop.
ASKING = frozenset(signal.Signals[f"SIG{name}"] for name in STOP_SIGNALS)

_POLL_SECONDS = 0.1


class Interrupted(BaseException):
    """A signal came before the ranks were started. Like KeyboardInterrupt, it does not derive from Exception."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(f"interrupted by {by.name} before the ranks were started")


class Interrupts:
    """Collects SIGINT, SIGTERM, SIGHUP and signals that request a stop, so that they do not end this process.

    Attributes:
        received: the signals that came so far, in order.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._since = math.inf
        self._previous: dict[signal.Signals, Any] = {}
        self._blocked: set[int] = set()
        self._raised = False

    @property
    def second_signal(self) -> bool:
        """Whether a second signal came that demands an end.

        Requests do not count: Slurm can send its own twice, and its SIGTERM may come before or after one.
        """
        return sum(number not in ASKING for number in self.received) > 1

    def over(self, seconds: float, began: float) -> bool:
        """Whether what follows the ranks, and began then, has to end: this process may be killed soon after a signal.

        It may go on for ``seconds`` from the first signal, or until a second one, and for a tenth of them in any case.
        """
        end = -math.inf if self.second_signal else self._since + seconds
        return time.monotonic() > max(end, began + seconds / 10)

    def wait(self, seconds: float) -> bool:
        """Wait for a time; returns whether it passed without a signal. The first signal ends the wait."""
        deadline = time.monotonic() + seconds
        while not self.received and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_SECONDS))
        return not self.received

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """A context manager in which a signal, or one that came before, raises :class:`Interrupted` at once."""
        self._raised = True
        try:
            self.check()
            yield
        finally:
            self._raised = False

    def check(self) -> None:
        """Raise :class:`Interrupted` if a signal has come."""
        if self.received:
            raise Interrupted(self.received[0])

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *ASKING):
            # A signal that is ignored already stays so: nohup ignores SIGHUP, and shells SIGINT of background jobs. Not
            # SIGTERM, without which a run could not be cancelled.
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._receive)
        # Whoever started this process may have had them blocked, which a new program and its children inherit.
        self._blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._previous)
        return self

    def __exit__(self, *raised: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._since = min(self._since, time.monotonic())
        self.received.append(signal.Signals(number))
        if self._raised:
            # Raised once only, so that the code that ends the probe's processes is not interrupted itself.
            self._raised = False
            raise Interrupted(self.received[-1])

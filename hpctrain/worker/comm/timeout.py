"""Limits how long a rank waits for the others: every wait of every collective goes through here."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.common.errors import HpctrainError, abbreviated
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.common.settings import TIMEOUT, TIMEOUT_HINT
from hpctrain.worker.comm import forks
from hpctrain.worker.comm.rank_run import run

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.worker.comm.liveness import LivenessWatch
    from hpctrain.worker.comm.survival import Survival

# The first polls spin, because most collectives end within microseconds. Later ones yield the core.
_SPIN_SECONDS = 0.001
_SLEEP_SECONDS = 20e-6
# After this time a wait counts as long, and its end need not be noticed at once.
_LONG_SECONDS = 0.01
_LONG_SLEEP_SECONDS = 0.0005
# How long a wait goes on while the main thread has not taken Ctrl-C.
_INTERRUPTED_SECONDS = 5.0
# Requests of MPI that no thread waits for any more.
_abandoned: list[object] = []


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A wait that has not ended.

    Attributes:
        what: names the wait in messages.
        since: the time of its begin by ``time.monotonic``.
        blocked: whether it is inside an MPI call, where no exception can be raised.
    """

    what: str
    since: float
    blocked: bool = False


def _script_waits() -> contextlib.AbstractContextManager[None]:
    """Counts a wait as the script's own, not as that of a thread beside it."""
    return run.times.waits() if threading.current_thread() is threading.main_thread() else contextlib.nullcontext()


class Timeout:
    """Waits, with a limit, for something that other ranks do.

    Args:
        who: this rank and its host, for messages.

    Attributes:
        seconds: the limit of a wait.
        watch: knows which other ranks wait; None where nobody does.
        survival: knows which ranks have died; None where ranks cannot go on without them.
        leaving: whether this rank's work is done, and it only waits for the others to end.
        interrupted: since when a KeyboardInterrupt waits for the main thread to come back to Python.
    """

    interrupted: float = math.inf

    def __init__(self, who: str) -> None:
        self._who = who
        self.seconds = TIMEOUT.read()
        self.leaving = False
        self._waits: dict[object, Wait] = {}
        self.watch: LivenessWatch | None = None
        self.survival: Survival | None = None

    def finish(
        self,
        start: Callable[[], MPI.Request],
        what: str,
        *,
        check_deaths: bool = True,
        pause: Callable[[], object] = lambda: None,
    ) -> None:
        """Start a non-blocking call of MPI and wait until it is done; for the other arguments see :meth:`wait`."""
        forks.require_rank(what)
        try:
            request = start()
        except Exception as error:
            self._explain(error)
            raise
        self.wait(request.Test, what, check_deaths=check_deaths, pause=pause, keep=request)

    def _explain(self, error: BaseException) -> None:
        """Raise the error of a rank's death in the place of MPI's, if this is one."""
        if self.survival:
            self.survival.explain(error)

    def abandon(self, requests: object) -> None:
        """Keep requests that no thread waits for any more alive: MPI may write into their buffers until it ends."""
        _abandoned.append(requests)

    def wait(
        self,
        done: Callable[[], bool],
        what: str,
        *,
        check_deaths: bool = True,
        pause: Callable[[], object] = lambda: None,
        keep: object = None,
    ) -> None:
        """Poll ``done`` until it is true. ``what`` names the wait in messages.

        Args:
            check_deaths: whether a rank's death ends the wait; False where MPI itself ends it, on all ranks alike.
            pause: is called between two polls.
            keep: requests to :meth:`abandon` if the wait fails.

        Raises:
            RanksLostError: a rank died.
            HpctrainError: it is not done in time, with exit code 4, because no rank has failed.
        """
        try:
            if done():
                return
            with _script_waits():
                since = time.monotonic()
                while time.monotonic() - since < _SPIN_SECONDS:
                    pause()
                    if done():
                        return
                with self._known(Wait(what=what, since=since)):
                    while not done():
                        pause()
                        waited = time.monotonic() - since
                        if check_deaths and self.survival:
                            self.survival.check()
                        self._check_interrupt(what)
                        if waited > self.seconds:
                            raise self.out_of_time(what)
                        time.sleep(_SLEEP_SECONDS if waited < _LONG_SECONDS else _LONG_SLEEP_SECONDS)
        except BaseException as error:
            if keep is not None:
                self.abandon(keep)
            self._explain(error)
            raise

    @contextlib.contextmanager
    def _known(self, wait: Wait) -> Iterator[None]:
        """Let the thread that watches the waits know of one."""
        call = object()
        self._waits[call] = wait
        try:
            yield
        finally:
            del self._waits[call]

    def _check_interrupt(self, what: str) -> None:
        """Raise after Ctrl-C where the main thread waits for this one in a library's C++, and so cannot take it.

        The other ranks have taken it, and do not come any more.
        """
        if time.monotonic() - self.interrupted > _INTERRUPTED_SECONDS:
            raise HpctrainError(
                "HT-run-interrupted",
                "{who} waited in {call} for ranks that Ctrl-C has interrupted",
                exit_code=RESUMABLE,
                who=self._who,
                call=what,
            )

    @contextlib.contextmanager
    def blocking(self, what: str) -> Iterator[None]:
        """A context for a blocking call, which cannot be polled: it counts as a wait as long as it lasts."""
        forks.require_rank(what)
        try:
            with _script_waits(), self._known(Wait(what=what, since=time.monotonic(), blocked=True)):
                yield
        except BaseException as error:
            self._explain(error)
            raise

    def oldest(self) -> Wait | None:
        """The longest current wait of all threads, for the thread that watches them."""
        return min(list(self._waits.values()), key=lambda wait: wait.since, default=None)

    def out_of_time(self, what: str) -> HpctrainError:
        """The error when the time for a wait is over."""
        ranks = abbreviated(watch.awaited if (watch := self.watch) else []) or "the other ranks"
        return HpctrainError(
            "HT-wait-timed-out",
            "{who} waited {seconds:g} s for {ranks} in {what}",
            f"look in logs/ for the rank that stopped earlier; {TIMEOUT_HINT}",
            exit_code=RESUMABLE,
            who=self._who,
            seconds=self.seconds,
            ranks=ranks,
            what=what,
        )

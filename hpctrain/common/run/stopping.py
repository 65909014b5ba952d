"""Requests to stop this process, by a signal or by a file such as ``RUN_DIR/stop``.

A signal has one handler in a process, so :data:`this_process` is the only object of its class. Nothing heavy is
imported here: a rank listens before it imports anything else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from hpctrain.common.files.regular import open_regular, private

# The exit status of a script, or of a run, that was interrupted and can be resumed.
RESUMABLE = 4
# What asks a launcher to stop. TERM is what cancelled and preempted jobs get; the other signals end a process at once,
# tell of a crash, cannot be handled, or are ignored by a process that does not listen yet.
STOP_SIGNALS = ("USR1", "USR2")
# Of them, what announces the end of a job to its batch process.
JOB_SIGNAL = signal.SIGUSR2

# The reason that `hpctrain cancel` gives, at which a job script does not requeue its run.
CANCELLED = "cancelled"

_MOST_BYTES = 2**12
# The file may lie on a shared file system.
_LOOK_SECONDS = 1.0


class StopRequests:
    """What asked a process to stop: the first signal that it listens to, or the file that it watches."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._agreed = False
        self._file: Path | None = None
        self._looked = float("-inf")
        self._handled: set[signal.Signals] = set()
        self._repeated: signal.Handlers = signal.SIG_DFL
        self._announce: Callable[[], None] | None = None

    def listen(self, *names: str) -> None:
        """Make these signals request a stop instead of ending the process; names without ``SIG``. Idempotent.

        A second SIGTERM or SIGINT ends the process: whoever sends it again does not wait for the end of a step.
        """
        if not self._handled:
            # A forked worker is ended by SIGTERM like any other process: it has no step to end.
            os.register_at_fork(after_in_child=self._forget)
        before = self.listens()
        for name in names:
            number = signal.Signals[f"SIG{name}"]
            if number not in self._handled:
                signal.signal(number, self._receive)
                self._handled.add(number)
        if self._announce and self.listens() and not before:
            self._announce()

    def outlast_repeats(self) -> None:
        """Ignore SIGTERM once it has asked for a stop, in tasks of srun.

        Slurm sends it to them at the begin of a partition's GraceTime and twice at its end, and SIGKILL later. Whoever
        is in a hurry stops srun, which kills them.
        """
        self._repeated = signal.SIG_IGN

    def listens(self) -> bool:
        """Whether SIGTERM requests a stop of this process."""
        return signal.SIGTERM in self._handled

    def announce(self, say: Callable[[], None]) -> None:
        """Call ``say`` once this process :meth:`listens`, unless it already does."""
        self._announce = say

    def watch(self, file: Path) -> None:
        """Treat the existence of ``file`` as a request to stop; its text is the reason."""
        self._file = file

    def asked(self, *, look: bool) -> str | None:
        """The reason for which this process was asked to stop; None if it was not.

        Args:
            look: also look for the file, at most once a second. One rank of a run is enough.
        """
        if self._reason is None and look and self._file and time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            with contextlib.suppress(OSError):
                self._reason = reason_in(self._file) or f"the file {self._file.name} was made"
        return self._reason

    def agree(self) -> None:
        """Record that all ranks stop, as if this one had been asked, whichever rank got the signal."""
        self._agreed = True
        self._reason = self._reason or "asked on another rank"

    def agreed(self) -> bool:
        """Whether all ranks know that they are to stop."""
        return self._agreed

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            # The default action, so that the system also ends a process that waits inside a collective.
            signal.signal(number, self._repeated if number == signal.SIGTERM else signal.SIG_DFL)
        if self._reason is None:
            self._reason = signal.Signals(number).name

    def _forget(self) -> None:
        for number in self._handled:
            signal.signal(number, signal.SIG_DFL)
        self._handled.clear()


this_process = StopRequests()
"""The requests to this process."""


def ask(file: Path, reason: str, *, replace: bool = False) -> bool:
    """Make the file that asks the ranks of a run to stop; whether ``reason`` is what it says now.

    Args:
        replace: an earlier request's reason too; otherwise that one stays.
    """
    # Ranks, which listen first thing, need none of what these import.
    from hpctrain.common.files.disk import disk_error
    from hpctrain.common.files.whole import write_whole

    if replace:
        write_whole(file, f"{reason}\n".encode(), private=True)
        return True
    try:
        with open(file, "x", opener=private) as opened:
            opened.write(f"{reason}\n")
    except FileExistsError:
        return False
    except OSError as error:
        raise disk_error(error, file) from error
    return True


def is_cancelled(file: Path) -> bool:
    """Whether the text of such a file is that of ``hpctrain cancel``."""
    try:
        return reason_in(file) == CANCELLED
    except OSError:
        return False


def reason_in(file: Path) -> str:
    """The text of such a file."""
    with open_regular(file, links=False) as opened:
        return opened.read(_MOST_BYTES).decode(errors="replace").strip()

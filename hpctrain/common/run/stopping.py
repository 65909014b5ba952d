"""Requests to stop this process, by a signal or by a file such as ``RUN_DIR/stop``.

A signal's handler can only be one for the whole process, so this is the process's own state. Nothing heavy is imported
here: a rank listens before it imports anything else.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from hpctrain.common.files.private import private
from hpctrain.common.files.regular import open_regular

# The exit status of a script, or of a run, that was interrupted and can be resumed.
RESUMABLE = 4
# What may ask a launcher, or announce the end of a job. TERM is what cancelled and preempted jobs get; the others end a
# process at once, tell of a crash, cannot be handled, or are ignored by a process that does not listen yet.
STOP_SIGNALS = ("ALRM", "USR1", "USR2", "XCPU")

# The reason that `hpctrain cancel` gives, at which a job script does not requeue its run.
CANCELLED = "cancelled"

_MOST_BYTES = 2**12
# The file may lie on a shared file system.
_LOOK_SECONDS = 1.0

_reason: str | None = None
_agreed = False
_file: Path | None = None
_also: Callable[[], str | None] | None = None
_looked = float("-inf")
_handled: set[signal.Signals] = set()
_announce: Callable[[], None] | None = None
_repeated = signal.SIG_DFL


def listen(*names: str) -> None:
    """Make these signals request a stop instead of ending the process; names without ``SIG``. Idempotent.

    A second SIGTERM or SIGINT ends the process: whoever sends it again does not wait for the end of a step.
    """
    if not _handled:
        # A forked worker is ended by SIGTERM like any other process: it has no step to end.
        os.register_at_fork(after_in_child=_forget)
    before = listens()
    for name in names:
        number = signal.Signals[f"SIG{name}"]
        if number not in _handled:
            signal.signal(number, _receive)
            _handled.add(number)
    if _announce and listens() and not before:
        _announce()


def outlast_repeats() -> None:
    """Ignore SIGTERM once it has asked for a stop, in tasks of srun.

    Slurm sends it to them at the begin of a partition's GraceTime and twice at its end, and SIGKILL later. Whoever is
    in a hurry stops srun, which kills them.
    """
    global _repeated
    _repeated = signal.SIG_IGN


def listens() -> bool:
    """Whether SIGTERM requests a stop of this process."""
    return signal.SIGTERM in _handled


def announce(say: Callable[[], None]) -> None:
    """Call ``say`` once this process :func:`listens`, unless it already does."""
    global _announce
    _announce = say


def watch(file: Path, also: Callable[[], str | None] | None = None) -> None:
    """Treat the existence of ``file`` as a request to stop; its text is the reason.

    Args:
        also: gives another reason, or None; called whenever the file is looked for and not there.
    """
    global _also, _file
    _also, _file = also, file


def ask(file: Path, reason: str, *, replace: bool = False) -> bool:
    """Make the file that asks the ranks of a run to stop; whether ``reason`` is what it says now.

    Args:
        replace: an earlier request's reason too; otherwise that one stays.

    Raises:
        HpctrainError: it cannot be written.
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


def reason_in(file: Path) -> str:
    """The text of such a file.

    Raises:
        OSError: it cannot be read.
    """
    with open_regular(file, links=False) as opened:
        return opened.read(_MOST_BYTES).decode(errors="replace").strip()


def asked(*, look: bool) -> str | None:
    """The reason for which this process was asked to stop; None if it was not.

    Args:
        look: also look for the file, at most once a second. One rank of a run is enough.
    """
    global _looked, _reason
    if _reason is None and look and _file and time.monotonic() - _looked >= _LOOK_SECONDS:
        _looked = time.monotonic()
        try:
            _reason = reason_in(_file) or f"the file {_file.name} was made"
        except OSError:
            _reason = _also() if _also else None
    return _reason


def agree() -> None:
    """Record that all ranks stop, as if this one had been asked, whichever rank got the signal."""
    global _agreed, _reason
    _agreed = True
    _reason = _reason or "asked on another rank"


def stop_agreed() -> bool:
    """Whether all ranks know that they are to stop."""
    return _agreed


def _receive(number: int, frame: FrameType | None) -> None:
    global _reason
    if number in (signal.SIGTERM, signal.SIGINT):
        # The default action, so that the system also ends a process that waits inside a collective.
        signal.signal(number, _repeated if number == signal.SIGTERM else signal.SIG_DFL)
    if _reason is None:
        _reason = signal.Signals(number).name


def _forget() -> None:
    for number in _handled:
        signal.signal(number, signal.SIG_DFL)
    _handled.clear()

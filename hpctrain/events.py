"""Events: what happened in a run, one JSON object a line in ``events.jsonl``. Its only record.

Every event has ``time`` (seconds since the epoch) and ``event`` (its kind); the other keys are the kind's:

============= =======================================================================================
kind          keys
============= =======================================================================================
start         attempt (1, 2, …), iteration (of the checkpoint that it goes on from, 0 for the beginning), job (of Slurm,
              JOB_TASK for one of an array, or null), restart (its number among those without progress that a
              launcher made by itself, 0 for none), launcher (text), hosts (in the order of the ranks), host and
              pid of the launcher, which writes it
damaged       path (the name in ``checkpoints/`` of one that an attempt passes over), fault (what is wrong with it),
              kept_as (the name that it has from now on); ahead of the attempt's start, as is the next
changed       differences (of the recipe or script from that of the attempts before: the old and the new value by
              dotted key)
run           recipe, framework, backend, ranks, hosts, epochs, iterations_per_epoch, parameters; of a script, whose
              recipe, epochs and iterations_per_epoch are null, parameters are those of its first model
step          iteration, epoch, loss, learning_rate, samples, first (where they begin in the epoch's order), order
              (CRC-32 of their numbers as little-endian 64-bit integers; of a sample that comes again in the epoch,
              which time it is, from 0, is above the lowest 40 bits), seconds; of these, on the rank that writes:
              communication_seconds (waiting for reductions), data_seconds (waiting for samples). Of a script's step
              only iteration, learning_rate and seconds (since the step before) are known
log           iteration (of the step that it is about), values (numbers by name) that a script has logged
non_finite    iteration, epoch (of a step whose update was left out, because its loss or its reduced gradients were not
              finite), rule (what was done: stop, skip or roll_back), ranks (whose own loss was not, or gradients where
              they are still known), parameters (how many have such a reduced gradient), parameter (the first of them,
              or null), to (the iteration of the checkpoint whose parameters the run has from then on, or null)
spike         iteration, epoch, loss, median (of the last 64 finite losses, which it is above by the recipe's factor)
epoch         epoch, seconds, samples_per_s, train_loss (of the steps with a finite one), test_loss, test_accuracy
broken_images epoch (after whose event it comes), count (of images that could not be decoded, on any rank, and were
              not reported before in this attempt), names (of the first 20)
checkpoint    iteration, epoch, seconds (until it was on disk), blocked_seconds (that training waited, on the rank that
              writes), bytes, path (its name in ``checkpoints/``); after that of the step in which this was seen
overlap       iteration, timeline: of one step, [seconds since its first gradient, what, bucket] a row
stopped       iteration, reason; after the checkpoint of a stop
stall         rank, host, iteration (of the step in progress, or null), waiting_for, seconds (that the others have
              waited), state (of its process), stack (of its Python threads; both "" where nobody could see them);
              written by the lowest rank that waits, once a wait
fault         rank, host (both null where nobody knows), message; written by the launcher. Where the other ranks go on,
              by them: rank (as the attempt began), host, message, iteration (of the step in progress),
              recovery_seconds, samples_affected (whose loss is missing in that step's; told with the first of those
              that died at once), ranks (that are left)
end           status (done, failed, resumable), seconds (of a run that is done, in all its attempts)
============= =======================================================================================

A number that is not finite is null.

A run has one ``start`` an attempt. What lies after the checkpoint that an attempt goes on from was lost, although its
events are in the file, and is done again: :func:`kept` leaves it out.
"""

from __future__ import annotations

import errno
import json
import math
import os
import reprlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hpctrain.errors import HpctrainError
from hpctrain.event_values import wrong_keys
from hpctrain.private_files import private

Event = dict[str, Any]

# What readers of each kind rely on; a kind that is not here is passed on as it is.
_KEYS = {
    "start": ("attempt", "iteration"),
    "damaged": ("path", "fault", "kept_as"),
    "changed": ("differences",),
    "run": ("recipe", "framework", "backend", "ranks", "epochs", "iterations_per_epoch", "parameters"),
    "step": ("iteration", "epoch", "loss", "learning_rate", "samples", "seconds", "communication_seconds"),
    "log": ("iteration", "values"),
    "non_finite": ("iteration", "epoch", "rule", "ranks", "parameters", "to"),
    "spike": ("iteration", "epoch", "loss", "median"),
    "epoch": ("epoch", "samples_per_s", "train_loss", "test_accuracy"),
    "broken_images": ("epoch", "count", "names"),
    "checkpoint": ("iteration",),
    "overlap": ("iteration", "timeline"),
    "stopped": ("iteration", "reason"),
    "stall": ("rank", "host", "waiting_for", "seconds"),
    "fault": ("rank", "host", "message"),
    "end": ("status",),
}
# And of a fault that the other ranks went on from.
_HEALED_KEYS = ("iteration", "recovery_seconds", "samples_affected", "ranks")
# Written by whoever sees it, at the same time as others, so that they say nothing of how far the writer was.
_ASIDE = b'"event": "stall"'
# How far ranks can be ahead of the one that writes, and more: it takes part in each step.
_RECENT = 16
_BLOCK_BYTES = 65536
# What the operating system says to a place that cannot hold files: the user's to change, not the run's fault.
_WRONG_PLACE = frozenset(
    (errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EPERM, errno.EROFS)
)


class EventWriter:
    """Appends events to a file; each line is there as a whole before ``emit`` returns, whatever happens to the process.

    A line survives a crash of the machine from the next :meth:`synchronise` on.

    Args:
        path: the file, or None to write nothing as long as another process does, which emits the same events: ranks
            other than 0 until :meth:`take_over`.
        alone: nobody else writes just now, so that a partial last line is what a crash left, and is cut off.

    Raises:
        HpctrainError: the file cannot be opened.
    """

    def __init__(self, path: Path | None, *, alone: bool = True) -> None:
        self._file: FileIO | None = None
        self._recent: deque[Event] = deque(maxlen=_RECENT)
        self._there: set[tuple[Any, ...]] = set()
        if path:
            self._open(path, alone=alone)

    def _open(self, path: Path, *, alone: bool) -> None:
        self._path = path
        try:
            if alone and path.exists():
                _drop_partial_line(path)
            # A line is one write of an unbuffered file, so a reader sees a line whole or not at all.
            self._file = open(path, "ab", buffering=0, opener=private)  # noqa: SIM115 - __exit__ closes it
        except OSError as error:
            raise disk_error(error, path) from error

    def take_over(self, path: Path) -> None:
        """Write in the place of a process that died: what it had not written of the newest events, and all later ones.

        Raises:
            HpctrainError: the file cannot be read or opened.
        """
        if self._file:
            return
        self._open(path, alone=True)
        self._there = {_identity(event) for event in _newest(path)}
        while self._recent:
            self._write(self._recent.popleft())

    def tells(self, kind: str, iteration: int) -> bool:
        """Whether the file has an event of that kind and iteration."""
        if self._file is None:
            return False
        return any(event["event"] == kind and event.get("iteration") == iteration for event in read_events(self._path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file:
            self._file.close()

    def emit(self, event: str, **values: Any) -> None:
        """Append one event.

        Raises:
            HpctrainError: the disk is full; says how to go on.
        """
        record = {"time": time.time(), "event": event, **{key: _json(value) for key, value in values.items()}}
        if self._file is None:
            self._recent.append(record)
        else:
            self._write(record)

    def synchronise(self) -> None:
        """Return when all that was emitted is on disk. Any thread may call it.

        Raises:
            HpctrainError: the disk refuses.
        """
        if self._file is None:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise disk_error(error, self._path) from error

    def _write(self, event: Event) -> None:
        if _identity(event) in self._there:
            return
        assert self._file is not None
        try:
            self._file.write(json.dumps(event, allow_nan=True).encode() + b"\n")
        except OSError as error:
            raise disk_error(error, self._path) from error


def _json(value: Any) -> Any:
    """JSON has no word for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _json(member) for key, member in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _identity(event: Event) -> tuple[Any, ...]:
    """What no two events of an attempt have in common."""
    return tuple(event.get(key) for key in ("event", "iteration", "epoch", "rank"))


def _newest(path: Path) -> list[Event]:
    """Events at the end of a file, of its last attempt: as many as any rank can be behind, stalls apart."""
    text, begin = b"", path.stat().st_size
    with path.open("rb") as file:
        while begin and text.count(b"\n") - text.count(_ASIDE) <= _RECENT:
            end, begin = begin, max(0, begin - _BLOCK_BYTES)
            file.seek(begin)
            text = file.read(end - begin) + text
    # The first may be a part of a line.
    lines = text.splitlines()[1 if begin else 0 :]
    events: list[Event] = []
    for line in lines:
        event = parse_event(line, str(path))
        events = [] if event["event"] == "start" else [*events, event]
    return events


def _drop_partial_line(path: Path) -> None:
    """A crash in the middle of a line leaves a part of it, which the next line must not be glued to."""
    text = path.read_bytes()
    if (whole := _whole(text)) < len(text):
        os.truncate(path, whole)


def _whole(text: bytes) -> int:
    """How much of the text is whole lines. A crash of the machine can leave zeros in the last one."""
    whole = text.rfind(b"\n") + 1
    begin = text.rfind(b"\n", 0, max(whole - 1, 0)) + 1
    return begin if b"\0" in text[begin:whole] else whole


def disk_error(
    error: OSError, path: Path | None, elsewhere: str = "choose another place with --run-dir"
) -> HpctrainError:
    """What to tell a user whose file cannot be written; ``elsewhere`` says how to write another one."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = f"free some space there, or {elsewhere}"
        return HpctrainError(f"no space left to write {path}: {error.strerror}", hint, exit_code=1)
    exit_code = 2 if error.errno in _WRONG_PLACE else 1
    return HpctrainError(f"cannot write {path}: {error.strerror}", elsewhere, exit_code=exit_code)


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file, in order. A last line that a crash cut short or damaged is left out.

    Raises:
        HpctrainError: there is no such file, or a line within it is not an event or lacks a key of its kind.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise HpctrainError(f"cannot read {path}: {error.strerror}", "is this a run directory?") from error
    lines = text[: _whole(text)].splitlines()
    for number, line in enumerate(lines, start=1):
        yield parse_event(line, f"{path}:{number}")


def attempts(events: Iterable[Event]) -> list[list[Event]]:
    """The events cut at each ``start``, the first of its part; ranks that were started by hand have a part without."""
    parts: list[list[Event]] = []
    for event in events:
        if event["event"] == "start" or not parts:
            parts.append([])
        parts[-1].append(event)
    return parts


def kept(events: Iterable[Event]) -> list[Event]:
    """The events of a run without the steps, epochs and checkpoints that were lost and done again.

    A checkpoint is of the moment before the evaluation of its epoch, so that evaluation is done again too.
    """
    whole: list[Event] = []
    for event in events:
        if event["event"] == "start":
            whole = list(_until(whole, event["iteration"]))
        whole.append(event)
    return whole


def _until(events: Iterable[Event], iteration: int) -> Iterator[Event]:
    done = 0
    for event in events:
        after = event.get("iteration", 0)
        match event["event"]:
            case "start" | "stopped" | "stall" | "fault":
                after = 0
            case "step":
                done = after
            case "epoch" | "broken_images" | "log":
                # They come after the event of the last step.
                after = done + 1
        if after <= iteration:
            yield event


def _required(event: Event) -> tuple[str, ...]:
    keys = _KEYS.get(event["event"], ())
    return (*keys, *_HEALED_KEYS) if event["event"] == "fault" and "recovery_seconds" in event else keys


def parse_event(line: bytes, where: str) -> Event:
    """One line of an events file."""
    try:
        # Not the bytes: zeros in a damaged line would be taken for another encoding.
        event = json.loads(line.decode())
    except ValueError as error:
        raise HpctrainError(f"{where}: not an event: {error}") from error
    if not isinstance(event, dict) or not isinstance(event.get("event"), str) or "time" not in event:
        raise HpctrainError(f"{where}: not an event: it lacks 'event' or 'time'")
    missing = [key for key in _required(event) if key not in event]
    if missing:
        raise HpctrainError(f"{where}: the event {event['event']!r} lacks {', '.join(map(repr, missing))}")
    if wrong := wrong_keys(event):
        values = ", ".join(f"{key} = {reprlib.repr(event[key])}" for key in wrong)
        raise HpctrainError(f"{where}: the event {event['event']!r} cannot have {values}")
    return event

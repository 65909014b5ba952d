"""Reads the events of a run, and selects those that count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.files.regular import open_regular
from hpctrain.run.events.kinds import Event, RunEvent, StartEvent, StepEvent, StoppedEvent
from hpctrain.run.events.lines import parse_event

LONGEST_LINE = 2**24
"""Bytes of an event; the longest that was seen, a stall with the stacks of many threads, has some thousands."""

_BLOCK_BYTES = 2**18


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file, in order. A last line that a crash truncated or damaged is left out.

    Raises:
        HpctrainError: there is no such file, or a line within it is not an event; names the line and what is wrong.
    """
    try:
        with open_regular(path, links=False) as file:
            for number, line in enumerate(_whole_lines(file), start=1):
                yield parse_event(line, f"{path}:{number}")
    except OSError as error:
        raise HpctrainError(f"cannot read {path}: {error.strerror}", "is this a run directory?") from error


def _whole_lines(file: BufferedReader) -> Iterator[bytes]:
    last = b""
    for line in iter(lambda: file.readline(LONGEST_LINE), b""):
        if len(line) < LONGEST_LINE and not line.endswith(b"\n"):
            break
        if last:
            yield last
        last = line
    if whole(last):
        yield last


def count_lines(path: Path) -> int:
    """How many lines a file has; 0 for one that cannot be read."""
    try:
        with open_regular(path, links=False) as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK_BYTES), b""))
    except OSError:
        return 0


def whole(text: bytes) -> int:
    """The length of the text up to its last whole line. A crash of the machine can leave zeros in that line."""
    end = text.rfind(b"\n") + 1
    begin = text.rfind(b"\n", 0, max(end - 1, 0)) + 1
    return begin if b"\0" in text[begin:end] else end


def attempts(events: Iterable[Event]) -> list[list[Event]]:
    """Divide the events at each start, which begins its part; ranks started by hand have a part without one."""
    parts: list[list[Event]] = []
    for event in events:
        if isinstance(event, StartEvent) or not parts:
            parts.append([])
        parts[-1].append(event)
    return parts


def kept(events: Iterable[Event]) -> list[Event]:
    """The events of a run without steps, epochs and checkpoints that were lost and repeated.

    A run has one start an attempt. What lies after the checkpoint that an attempt goes on from was lost, although its
    events are in the file.
    """
    found: list[Event] = []
    saves, saved = ScriptSaves(), 0
    for event in events:
        if isinstance(event, StartEvent):
            found = [*found[:saved], *_until(found[saved:], event.iteration)]
        found.append(event)
        if saves.at(event):
            saved = len(found)
    return found


class ScriptSaves:
    """Finds, in the events of a run in their order, where a script is known to have saved its state.

    A script does so by itself, and where it was stopped it has. What came before is never lost.
    """

    def __init__(self) -> None:
        self._recipe = False

    def at(self, event: Event) -> bool:
        """Whether that is the next event of the run."""
        if isinstance(event, RunEvent):
            self._recipe = event.recipe is not None
        return isinstance(event, StoppedEvent) and not self._recipe


def _until(events: Iterable[Event], iteration: int) -> Iterator[Event]:
    done = 0
    for event in events:
        if isinstance(event, StepEvent):
            done = event.iteration
        if event.last_step_needed(done) <= iteration:
            yield event

"""``hpctrain logs``: reads logs even while they are written; a line that several ranks printed comes once."""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.options import Target
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import matching, reading
from hpctrain.common.files.printable import printable
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.events.reader import LONGEST_LINE, parse_event
from hpctrain.common.run.plan import Plan
from hpctrain.control.schedulers.run_jobs import find_run
from hpctrain.control.supervision.follow import Tail
from hpctrain.report.console import Console
from hpctrain.report.output import answer, tell
from hpctrain.report.status import read_status

_POLL_SECONDS = 0.5
# How often Slurm is asked whether the run goes on.
_STATE_SECONDS = 10.0
# Bytes read at a time from all logs, and at least from each, so that lines that several ranks printed are merged.
_MOST_BYTES, _LEAST_BYTES = 2**26, 2**16
_RANK = re.compile(r"rank-(\d+)\.log", re.ASCII)
# Removed, because a colour that is not reset would go on after the line.
# What shows nothing, with the backspaces by which Keras goes back.
_BLANK = "\b \t"
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")

_Numbered = tuple[str, int]


def logs(
    target: Target = "last",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the run to its end, across requeues.")] = False,
    rank: Annotated[str | None, typer.Option(metavar="LIST", help="Only these ranks: 0, or 0-3,7.")] = None,
    job: Annotated[bool, typer.Option("--job", help="The logs of the jobs instead of those of the ranks.")] = False,
) -> None:
    """Print what the ranks of a run print. A line that several ranks printed comes once, with their numbers."""
    directory = find_run(target)
    if job and rank:
        raise HpctrainError(
            "HT-options-exclude-each-other",
            "--rank is for the logs of ranks, and --job for those of jobs",
            "leave out one of them",
        )
    if job:
        reader: RankLogs | JobLogs = JobLogs(directory)
    else:
        plan = read_model(directory.plan, Plan)
        reader = RankLogs(directory, _ranks(rank), plan.ranks, epochs=plan.recipe is not None)
    printed = False
    try:
        for lines in _until_end(directory, reader, follow):
            printed = True
            answer("\n".join(lines))
    except KeyboardInterrupt:
        return
    if not printed:
        tell("hpctrain: nothing has been printed yet" + ("" if job else "; --job shows what the job printed"))


def _ranks(text: str | None) -> frozenset[int] | None:
    if text is None:
        return None
    from ClusterShell.RangeSet import RangeSet, RangeSetException

    try:
        return frozenset(RangeSet(text).intiter())
    except (RangeSetException, ValueError) as error:
        raise HpctrainError(
            "HT-option-bad-value",
            "--rank {text}: {reason}",
            "numbers and ranges with commas between them: 0-3,7",
            text=text,
            reason=error,
        ) from error


def _until_end(directory: RunDirectory, reader: RankLogs | JobLogs, follow: bool) -> Iterator[list[str]]:
    """The new lines, again and again while the run may print more."""
    checked, goes_on = float("-inf"), follow
    while True:
        if goes_on and time.monotonic() - checked > _STATE_SECONDS:
            checked, goes_on = time.monotonic(), _goes_on(directory)
        # Read after the check, so that nothing printed between the last read and the run's end is missed.
        if lines := list(reader.lines(last=not goes_on)):
            yield lines
        elif not goes_on:
            return
        if goes_on:
            time.sleep(_POLL_SECONDS)


def _goes_on(directory: RunDirectory) -> bool:
    run, problem = read_status(directory)
    # Without Slurm's answer, the run is not known to have ended.
    return problem is not None or run.state in ("running", "waiting")


class RankLogs:
    """The logs of the ranks, merged.

    Args:
        epochs: whether rank 0's lines include those that ``hpctrain run`` shows of a recipe's epochs.
    """

    def __init__(
        self, directory: RunDirectory, ranks: frozenset[int] | None, world_size: int, *, epochs: bool = False
    ) -> None:
        beyond = sorted(rank for rank in ranks or () if rank >= world_size)
        if beyond:
            raise HpctrainError(
                "HT-option-bad-value",
                "--rank: there is no rank {rank}",
                f"the run has the ranks 0 to {world_size - 1}",
                rank=beyond[0],
            )
        self._directory = directory
        self._ranks = ranks
        self._logs: dict[int, _Log] = {}
        self._events = _EventLines(directory) if epochs and (ranks is None or 0 in ranks) else None
        # One rank needs no prefix; how many others there are does not matter, and a damaged plan has any number.
        self._prefix: Callable[[tuple[int, ...]], str] = prefixes(ranks or range(min(world_size, 2)))

    def lines(self, *, last: bool) -> Iterator[str]:
        """New lines; ``last`` says that the run has ended. Lines that other ranks print later are not merged."""
        logs = {
            int(name[1]): path
            for path in matching(self._directory.logs, "rank-*.log")
            if (name := _RANK.fullmatch(path.name))
        }
        share = max(_LEAST_BYTES, _MOST_BYTES // max(1, len(logs)))
        for rank, path in logs.items():
            if self._ranks is None or rank in self._ranks:
                self._logs.setdefault(rank, _Log(path))
        new = {rank: log.new(last=last, at_most=share) for rank, log in self._logs.items()}
        for ranks, line in merge(new):
            yield f"{self._prefix(ranks)}{line}"
        if self._events:
            yield from self._events.lines()


class _EventLines:
    """What ``hpctrain run`` shows of a run's events."""

    def __init__(self, directory: RunDirectory) -> None:
        self._tail = Tail(directory.events, whole=True)
        self._shown = io.StringIO()
        self._console = Console(self._shown, self._shown)

    def lines(self) -> list[str]:
        """New lines. An event that cannot be read is left out; one longer than any ends them: a hole has any size."""
        with reading(self._tail.path, "the files in logs/ are what the ranks printed"):
            while (lines := self._tail.lines()) and len(lines[-1]) <= LONGEST_LINE:
                for line in lines:
                    with contextlib.suppress(HpctrainError):
                        self._console.show(parse_event(line, str(self._tail.path)))
        text = self._shown.getvalue()
        self._shown.seek(0)
        self._shown.truncate()
        return text.splitlines()


class _Log(Tail):
    """A log from its beginning, for a terminal."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, whole=True)
        self._end = 0
        self._open = b""

    def new(self, *, last: bool, at_most: int) -> list[str]:
        """New lines. After the run's end, lines that are added while reading are not waited for."""
        with reading(self.path, "--rank leaves it out"):
            if last:
                self._end = self._end or self.path.stat().st_size or 1
            text = b"" if last and self.offset >= self._end else self.text(at_most=at_most)
        *lines, self._open = (self._open + text).split(b"\n")
        # Output without line breaks comes in parts, so that it does not fill the memory.
        if self._open and (len(self._open) > _LEAST_BYTES or (last and not lines)):
            lines.append(self._open)
            self._open = b""
        return [plain(line.decode(errors="replace")) for line in lines]


class JobLogs:
    """The logs of a run's jobs, one after the other."""

    def __init__(self, directory: RunDirectory) -> None:
        self._folder = directory.logs
        self._logs: dict[Path, _Log] = {}

    def lines(self, *, last: bool) -> Iterator[str]:
        """New lines; ``last`` says that the run has ended. With several jobs, a heading names the log."""
        for path in sorted(matching(self._folder, "job-*.log"), key=lambda path: (len(path.name), path.name)):
            self._logs.setdefault(path, _Log(path))
        for path, log in self._logs.items():
            new = log.new(last=last, at_most=_MOST_BYTES)
            if new and len(self._logs) > 1:
                yield f"==> {path.name} <=="
            yield from new


def merge(lines: Mapping[int, Sequence[str]]) -> Iterator[tuple[tuple[int, ...], str]]:
    """All lines, each with the ranks that printed it, rising.

    The n-th occurrence of a line on one rank is merged with the n-th on another. It stands where the lowest of its
    ranks printed it: behind the line that was before it there.
    """
    ranks_of: dict[_Numbered | None, list[int]] = {}
    # A linked list, since lines are put between others.
    following: dict[_Numbered | None, _Numbered | None] = {None: None}
    for rank in sorted(lines):
        before: _Numbered | None = None
        for line in _numbered(lines[rank]):
            if line not in ranks_of:
                ranks_of[line] = []
                following[line], following[before] = following[before], line
            ranks_of[line].append(rank)
            before = line
    shown = following[None]
    while shown:
        yield tuple(ranks_of[shown]), shown[0]
        shown = following[shown]


def _numbered(lines: Sequence[str]) -> Iterator[_Numbered]:
    """Each line with how often it has occurred before."""
    seen: Counter[str] = Counter()
    for line in lines:
        yield line, seen[line]
        seen[line] += 1


def prefixes(ranks: Collection[int]) -> Callable[[tuple[int, ...]], str]:
    """A function that gives the prefix of a line, such as ``[0-2,5] ``; empty if there is one rank."""
    # Imported here, because it takes a twentieth of a second that `hpctrain --help` does not need.
    from ClusterShell.RangeSet import RangeSet

    return (lambda _: "") if len(ranks) == 1 else cache(lambda printed_by: f"[{RangeSet(printed_by)}] ")


def plain(line: str) -> str:
    """What a terminal shows of a line at its end, without colours and with other control characters written out."""
    states = [state.strip("\b") for state in line.split("\r")]
    shown = next((state for state in reversed(states) if state.strip(_BLANK)), "")
    return printable(_COLOURS.sub("", shown))

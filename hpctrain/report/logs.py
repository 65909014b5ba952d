"""Reads the logs of a run, even while they are still being written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory
from hpctrain.control.schedulers.find_run import FoundRun
from hpctrain.control.supervision.follow import Tail
from hpctrain.report.merged_log import merge, plain, prefixes

# Bytes read at a time from all logs, and at least from each, so that lines that several ranks printed are merged.
_MOST_BYTES, _LEAST_BYTES = 2**26, 2**16
_RANK = re.compile(r"rank-(\d+)\.log", re.ASCII)


class RankLogs:
    """The logs of the ranks, merged.

    Args:
        ranks: the ranks whose logs are read; None for all of the ``world_size``.

    Raises:
        HpctrainError: the run has no such rank.
    """

    def __init__(self, directory: RunDirectory, ranks: frozenset[int] | None, world_size: int) -> None:
        beyond = sorted(rank for rank in ranks or () if rank >= world_size)
        if beyond:
            raise HpctrainError(f"--rank: there is no rank {beyond[0]}", f"the run has the ranks 0 to {world_size - 1}")
        self._directory = directory
        self._ranks = ranks
        self._logs: dict[int, _Log] = {}
        self._prefix: Callable[[tuple[int, ...]], str] = prefixes(ranks or range(world_size))

    def lines(self, *, last: bool) -> Iterator[str]:
        """New lines; ``last`` says that the run has ended. Lines that other ranks print later are not merged."""
        logs = {
            int(name[1]): path
            for path in self._directory.logs.glob("rank-*.log")
            if (name := _RANK.fullmatch(path.name))
        }
        share = max(_LEAST_BYTES, _MOST_BYTES // max(1, len(logs)))
        for rank, path in logs.items():
            if self._ranks is None or rank in self._ranks:
                self._logs.setdefault(rank, _Log(path))
        new = {rank: log.new(last=last, at_most=share) for rank, log in self._logs.items()}
        for ranks, line in merge(new):
            yield f"{self._prefix(ranks)}{line}"


class _Log(Tail):
    """A log from its beginning, for a terminal."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, whole=True, longest=_LEAST_BYTES)
        self._end = 0

    def new(self, *, last: bool, at_most: int) -> list[str]:
        """New lines. After the run's end, lines that are added while reading are not waited for."""
        try:
            if last:
                self._end = self._end or self.path.stat().st_size or 1
                if self.offset >= self._end:
                    return []
            return [*map(plain, self.lines(last=last, at_most=at_most))]
        except OSError as error:
            raise HpctrainError(f"cannot read {self.path}: {error.strerror}", "--rank leaves it out") from error


class JobLogs:
    """The logs of a run's jobs, or of one task of an array, one after the other."""

    def __init__(self, found: FoundRun) -> None:
        self._folder = found.job_directory.logs
        self._names = "job-*.log" if found.task is None else f"job-*_{found.task}.log"
        self._logs: dict[Path, _Log] = {}

    def lines(self, *, last: bool) -> Iterator[str]:
        """New lines; ``last`` says that the run has ended. With several jobs, a heading names the log."""
        for path in sorted(self._folder.glob(self._names), key=lambda path: (len(path.name), path.name)):
            self._logs.setdefault(path, _Log(path))
        for path, log in self._logs.items():
            new = log.new(last=last, at_most=_MOST_BYTES)
            if new and len(self._logs) > 1:
                yield f"==> {path.name} <=="
            yield from new

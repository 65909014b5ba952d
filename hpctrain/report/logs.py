"""Reads the logs of a run, also while it still writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from hpctrain.batch.find_run import FoundRun
from hpctrain.errors import HpctrainError
from hpctrain.report.merged_log import merge, plain, prefixes
from hpctrain.run.directory import RunDirectory
from hpctrain.supervision.follow import Tail

# Of all logs at a time; of each rank at least so many, for lines that several printed to come once.
_MOST_BYTES, _LEAST_BYTES = 2**26, 2**16
_RANK = re.compile(r"rank-(\d+)\.log", re.ASCII)


class RankLogs:
    """The logs of the ranks, merged.

    Args:
        directory: the run.
        ranks: which ones; None for all.
        among: how many the run has.

    Raises:
        HpctrainError: it has no such rank.
    """

    def __init__(self, directory: RunDirectory, ranks: frozenset[int] | None, among: int) -> None:
        beyond = sorted(rank for rank in ranks or () if rank >= among)
        if beyond:
            raise HpctrainError(f"--rank: there is no rank {beyond[0]}", f"the run has the ranks 0 to {among - 1}")
        self._directory = directory
        self._ranks = ranks
        self._tails: dict[int, Tail] = {}
        self._prefix: Callable[[tuple[int, ...]], str] = prefixes(ranks or range(among))

    def lines(self, *, last: bool) -> Iterator[str]:
        """New lines; ``last`` says that nobody writes any more. Lines that other ranks print later are not merged."""
        for path in self._directory.logs.glob("rank-*.log"):
            name = _RANK.fullmatch(path.name)
            if name and (self._ranks is None or int(name[1]) in self._ranks):
                self._tails.setdefault(int(name[1]), Tail(path, whole=True))
        share = max(_LEAST_BYTES, _MOST_BYTES // max(1, len(self._tails)))
        new = {rank: [*map(plain, _read(tail, last, share))] for rank, tail in self._tails.items()}
        for ranks, line in merge(new):
            yield f"{self._prefix(ranks)}{line}"


def _read(tail: Tail, last: bool, at_most: int) -> list[bytes]:
    try:
        return tail.lines(last=last, at_most=at_most)
    except OSError as error:
        raise HpctrainError(f"cannot read {tail.path}: {error.strerror}", "--rank leaves it out") from error


class JobLogs:
    """The logs of a run's jobs, or of one task of an array, one after the other."""

    def __init__(self, found: FoundRun) -> None:
        self._folder = found.job_directory.logs
        self._names = "job-*.log" if found.task is None else f"job-*_{found.task}.log"
        self._tails: dict[Path, Tail] = {}

    def lines(self, *, last: bool) -> Iterator[str]:
        """New lines; ``last`` says that nobody writes any more. With several jobs, a heading names the log."""
        for path in sorted(self._folder.glob(self._names), key=lambda path: (len(path.name), path.name)):
            self._tails.setdefault(path, Tail(path, whole=True))
        for path, tail in self._tails.items():
            new = _read(tail, last, _MOST_BYTES)
            if new and len(self._tails) > 1:
                yield f"==> {path.name} <=="
            yield from map(plain, new)

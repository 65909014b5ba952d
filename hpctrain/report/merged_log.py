"""Merges the logs of many ranks: a line that several ranks printed appears once."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache

from hpctrain.common.files.printable import printable

# They would run on after the line.
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")

_Numbered = tuple[str, int]


def merge(lines: Mapping[int, Sequence[str]]) -> Iterator[tuple[tuple[int, ...], str]]:
    """All lines, each with the ranks that printed it.

    The lines of a rank come in their order, each exactly once. The n-th time that a line occurs on one rank and on
    another is the same event, unless the orders of the ranks contradict each other; the ranks then say it one after
    the other. The cost grows with the number of lines.

    Args:
        lines: what each rank said, by rank.

    Yields:
        The ranks, rising, and the line.
    """
    left = {rank: deque(_numbered(own)) for rank, own in sorted(lines.items())}
    expected = Counter(line for own in left.values() for line in own)
    # Which ranks have come to a line; it is complete when these are all that will.
    waiting: dict[_Numbered, list[int]] = defaultdict(list)
    complete: deque[_Numbered] = deque()

    def arrive(rank: int) -> None:
        if left[rank]:
            line = left[rank][0]
            waiting[line].append(rank)
            if len(waiting[line]) == expected[line]:
                complete.append(line)

    for rank in left:
        arrive(rank)
    for own in left.values():
        while own:
            # The orders contradict each other where nothing is complete: the first rank goes on alone or with company.
            line = complete.popleft() if complete else own[0]
            ranks = waiting.pop(line)
            expected[line] -= len(ranks)
            yield tuple(sorted(ranks)), line[0]
            for rank in ranks:
                left[rank].popleft()
                arrive(rank)


def _numbered(lines: Sequence[str]) -> Iterator[_Numbered]:
    """Each line with how often it has occurred before."""
    seen: Counter[str] = Counter()
    for line in lines:
        yield line, seen[line]
        seen[line] += 1


def prefixes(ranks: Collection[int]) -> Callable[[tuple[int, ...]], str]:
    """A function that gives the prefix of a line, such as ``[0-2,5] ``; empty if there is one rank."""
    # A twentieth of a second that `hpctrain --help` does not need.
    from ClusterShell.RangeSet import RangeSet

    return (lambda _: "") if len(ranks) == 1 else cache(lambda said_by: f"[{RangeSet(said_by)}] ")


def plain(line: bytes) -> str:
    """A line for a terminal, without colours and with other control characters written out."""
    return printable(_COLOURS.sub("", line.decode(errors="replace")))

"""Merges the logs of many ranks: a line that several ranks printed appears once."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache

from hpctrain.common.files.printable import printable

# Removed, because a colour that is not reset would go on after the line.
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")

_Numbered = tuple[str, int]


def merge(lines: Mapping[int, Sequence[str]]) -> Iterator[tuple[tuple[int, ...], str]]:
    """All lines, each with the ranks that printed it.

    The lines of a rank come in their order, each exactly once. The n-th occurrence of a line on one rank is merged with
    the n-th on another, unless the orders of the ranks contradict each other; the line then comes once for each. The
    cost grows with the number of lines.

    Args:
        lines: the lines that each rank printed, by rank.

    Yields:
        The ranks, rising, and the line.
    """
    left = {rank: deque(_numbered(own)) for rank, own in sorted(lines.items())}
    expected = Counter(line for own in left.values() for line in own)
    # The ranks that have arrived at a line, which is complete when all ranks that have it have arrived.
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
            # Where no line is complete, the orders contradict each other: the first rank's next line goes first.
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
    # Imported here, because it takes a twentieth of a second that `hpctrain --help` does not need.
    from ClusterShell.RangeSet import RangeSet

    return (lambda _: "") if len(ranks) == 1 else cache(lambda printed_by: f"[{RangeSet(printed_by)}] ")


def plain(line: bytes) -> str:
    """A line for a terminal, without colours and with other control characters written out."""
    return printable(_COLOURS.sub("", line.decode(errors="replace")))

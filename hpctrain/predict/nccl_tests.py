"""Reads the text that nccl-tests' ``all_reduce_perf`` prints (https://github.com/NVIDIA/nccl-tests).

Its columns have changed: before 2.13 there were no ``root`` and an ``error`` of rounding instead of ``#wrong``; since
2.16.7 there is a line with the test's name, since 2.19.2 there may be columns of single iterations. The header's own
names are followed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpctrain.errors import HpctrainError

# What mpirun --tag-output, and nothing else, puts before a line.
_TAG = re.compile(r"^\[\d+,\d+\]<std(?:out|err)>:")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device")
_WRONG_VALUES = re.compile(r"#?\s*Out of bounds values\s*:\s*(\d+)")
_END = re.compile(r"#?\s*Avg bus bandwidth\s*:")
_TEST = re.compile(r"#\s+Collective test starting:\s*(\S+)")

_AGAIN = "run all_reduce_perf again, and keep all that it prints"
# Bandwidths have two digits after the point: smaller ones say nothing about their ratio.
_TELLING_GB_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run of ``all_reduce_perf``.

    Attributes:
        ranks: of one collective.
        hosts: on which all ranks were.
        kind: type and operation, such as ``float sum``.
        out_of_place, in_place: bytes and seconds of each row; empty where not measured.
    """

    ranks: int
    hosts: int
    kind: str
    out_of_place: tuple[tuple[float, float], ...]
    in_place: tuple[tuple[float, float], ...]


@dataclass(kw_only=True)
class _Text:
    """What was found so far."""

    where: str
    ranks: dict[int, tuple[str, str]] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    points: tuple[list[tuple[float, float]], list[tuple[float, float]]] = field(default_factory=lambda: ([], []))
    # Bus bandwidth to algorithm bandwidth of each row that tells.
    factors: list[tuple[int, float]] = field(default_factory=list)
    ended: bool = False
    lines: int = 0


def read_nccl_tests(text: str, where: str) -> Measured:
    """The rows of one run.

    Args:
        text: all that ``all_reduce_perf`` printed; NCCL's own lines may be between.
        where: the file's name, for errors.

    Raises:
        HpctrainError: results were wrong; the text is cut off or damaged, of another test, of several types or
            operations, or of several runs.
    """
    found = _Text(where=where)
    for number, raw in enumerate(text.splitlines(), start=1):
        line = _TAG.sub("", raw).strip()
        found.lines = number
        if line.startswith("#") or not line[:1].isdigit():
            _remark(found, line, number)
        elif found.columns and line.split()[0].isdigit():
            _row(found, line.split(), number)
    _check_whole(found)
    ranks = _group(found)
    _check_factor(found, ranks)
    return Measured(
        ranks=ranks,
        hosts=len({host for _, host in found.ranks.values()}),
        kind=found.kinds.pop(),
        out_of_place=tuple(found.points[0]),
        in_place=tuple(found.points[1]),
    )


def _remark(found: _Text, line: str, number: int) -> None:
    at = f"{found.where}:{number}"
    if rank := _RANK.match(line):
        if int(rank[1]) in found.ranks:
            raise HpctrainError(
                f"{at}: rank {rank[1]} for the second time: several runs, or processes that do not know each other",
                "give one run a file; under mpirun nccl-tests must be built with MPI=1",
            )
        found.ranks[int(rank[1])] = rank[2] or "0", rank[3]
    elif (test := _TEST.match(line)) and not test[1].startswith("all_reduce"):
        raise HpctrainError(f"{at}: the test is {test[1]}", "valid: all_reduce_perf")
    elif {"size", "count", "busbw"} <= set(line.lstrip("# ").split()):
        found.columns = line.lstrip("# ").split()
        if "time" not in found.columns:
            raise HpctrainError(f"{at}: no column time, perhaps times of the CPU (-C)", "measure without -C")
    elif wrong := _WRONG_VALUES.match(line):
        if int(wrong[1]):
            raise HpctrainError(f"{at}: {wrong[1]} values out of bounds", _wrong_hint())
    elif _END.match(line):
        found.ended = True


def _row(found: _Text, cells: Sequence[str], number: int) -> None:
    """Add a row's points, the columns from ``time`` on once or twice."""
    at = f"{found.where}:{number}"
    columns = found.columns
    if columns[-1] == "timestamp":
        # A date and a time, under one name.
        columns, cells = columns[:-1], cells[:-2]
    if len(cells) != len(columns):
        raise HpctrainError(f"{at}: a row with {len(cells)} of {len(columns)} columns, perhaps cut off", _AGAIN)
    named = dict(zip(columns[: columns.index("time")], cells, strict=False))
    if named.get("redop") == "none":
        raise HpctrainError(f"{at}: a test without an operation, no all-reduce", "valid: all_reduce_perf")
    size = _number(cells[0], "size", at)
    found.kinds.add(" ".join(named[key] for key in ("type", "redop") if key in named))
    starts = [place for place, column in enumerate(columns) if column == "time"]
    for points, start, end in zip(found.points, starts, [*starts[1:], len(columns)], strict=False):
        measured = dict(zip(columns[start:end], cells[start:end], strict=True))
        if measured.get("#wrong", "N/A") != "N/A" and _number(measured["#wrong"], "#wrong", at):
            raise HpctrainError(f"{at}: {measured['#wrong']} wrong values at {cells[0]} bytes", _wrong_hint())
        # A size that is no multiple of the ranks' parts is rounded down, at last to nothing.
        if measured["time"] == "N/A" or not size:
            continue
        if not (micros := _number(measured["time"], "time", at)):
            raise HpctrainError(f"{at}: a time of 0", _AGAIN)
        points.append((size, micros * 1e-6))
        if (rate := _number(measured["algbw"], "algbw", at)) >= _TELLING_GB_S:
            found.factors.append((number, _number(measured["busbw"], "busbw", at) / rate))


def _check_whole(found: _Text) -> None:
    if not found.columns:
        raise HpctrainError(
            f"{found.where}: no table of nccl-tests (no line with size, count and busbw)",
            "give the output of nccl-tests' all_reduce_perf, or of `hpctrain bench allreduce --json`",
        )
    if not found.ended:
        raise HpctrainError(f"{found.where}:{found.lines}: it ends without '# Avg bus bandwidth': cut off", _AGAIN)
    if not any(found.points):
        raise HpctrainError(f"{found.where}: no row with a time", _AGAIN)
    if len(found.kinds) > 1:
        raise HpctrainError(
            f"{found.where}: several types or operations: {', '.join(sorted(found.kinds))}",
            "measure one, such as -d float -o sum",
        )


def _group(found: _Text) -> int:
    """The ranks of one collective: all, or those of a group where NCCL_TESTS_SPLIT made several of one size."""
    groups = Counter(group for group, _ in found.ranks.values())
    if not groups:
        raise HpctrainError(f"{found.where}: no line '#  Rank  0 …', so the number of ranks is unknown", _AGAIN)
    if len(set(groups.values())) > 1:
        sizes = ", ".join(str(size) for size in sorted(set(groups.values())))
        raise HpctrainError(f"{found.where}: groups of {sizes} ranks", "measure groups of one size")
    return next(iter(groups.values()))


def _check_factor(found: _Text, ranks: int) -> None:
    """An all-reduce has 2 (n - 1) / n times the bandwidth on its links (doc/PERFORMANCE.md of nccl-tests)."""
    wanted = 2 * (ranks - 1) / ranks
    for number, factor in found.factors:
        if abs(factor - wanted) > 0.02 * wanted + 0.005:
            raise HpctrainError(
                f"{found.where}:{number}: busbw is {factor:.3g} times algbw; of an all-reduce of {ranks} ranks it is "
                f"{wanted:.3g} times",
                "give all_reduce_perf's output with a line for each rank",
            )


def _number(cell: str, column: str, at: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise HpctrainError(f"{at}: {column} is {cell!r}, not a number of at least 0", _AGAIN)
    return value


def _wrong_hint() -> str:
    return "results were wrong, so times mean nothing: repair the machine, then run all_reduce_perf again"

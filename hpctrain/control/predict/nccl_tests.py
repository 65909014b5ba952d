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

from hpctrain.common.errors import HpctrainError
from hpctrain.control.predict.measurements import Curve, medians

_RANK = re.compile(
    r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device(?:\s+\d+\s+\[[^\]]*\]\s*(.*))?"
)
_WRONG_VALUES = re.compile(r"#?\s*Out of bounds values\s*:\s*(\d+)")
_END = re.compile(r"#?\s*Avg bus bandwidth\s*:")
_TEST = re.compile(r"#\s+Collective test starting:\s*(\S+)")
_HEADER = {"size", "count", "time", "algbw", "busbw"}
# Bandwidths are printed with two decimals, so the ratio of smaller ones is not exact enough.
_TELLING_GB_S = 1.0
_ROUNDED, _RELATIVE = 0.0055, 2e-4


def nccl_curve(text: str, where: str) -> Curve:
    """The all-reduces of one run out of place, as NCCL's users mostly run them.

    Args:
        text: all that was printed. NCCL's own lines may be between.
        where: the file's name for error messages.

    Raises:
        HpctrainError: results were wrong; the text is cut off or damaged, of another test, of several types or
            operations, of groups (``NCCL_TESTS_SPLIT``), or of several runs.
    """
    run = _Run(where)
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        run.at = f"{where}:{number}"
        if line.startswith("#") or not line[:1].isdigit():
            run.remark(line)
        elif run.columns and line.split()[0].isdigit():
            run.row(line.split())
    run.at = where
    if not run.ended:
        raise run.unusable("no whole table of nccl-tests, from '#  Rank …' to '# Avg bus bandwidth'")
    return run.curve(where)


@dataclass
class _Run:
    """The part of a run that was read so far.

    Attributes:
        at: the line that is read.
        ranks: the host and the GPU of each.
        points: bytes and seconds.
        rates: the line of each fast enough row, and its algorithm and bus bandwidths.
    """

    at: str
    columns: list[str] = field(default_factory=list)
    ranks: dict[int, tuple[str, str]] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    points: list[tuple[float, float]] = field(default_factory=list)
    rates: list[tuple[str, float, float]] = field(default_factory=list)
    ended: bool = False

    def unusable(self, problem: str) -> HpctrainError:
        """The error for a run that does not tell how long an all-reduce takes."""
        return HpctrainError(
            "HT-nccl-tests-not-usable",
            "{where}: {problem}",
            "run one all_reduce_perf with MPI=1 over all ranks, and give all that it prints",
            where=self.at,
            problem=problem,
        )

    def wrong(self, count: str) -> HpctrainError:
        """The error for wrong results."""
        return HpctrainError(
            "HT-nccl-tests-wrong-results",
            "{where}: {count} wrong values",
            "results were wrong, so times mean nothing: repair the machine, then run all_reduce_perf again",
            where=self.at,
            count=count,
        )

    def remark(self, line: str) -> None:
        """Read a line that is no row."""
        if rank := _RANK.match(line):
            if int(rank[1]) in self.ranks or int(rank[2] or 0):
                raise self.unusable(f"rank {rank[1]} for the second time, or in a group of its own: several runs")
            self.ranks[int(rank[1])] = rank[3], (rank[4] or "").strip()
        elif (test := _TEST.match(line)) and not test[1].startswith("all_reduce"):
            raise self.unusable(f"the test is {test[1]}")
        elif {"size", "count", "busbw"} <= set(line.lstrip("# ").split()):
            columns = line.lstrip("# ").split()
            if self.columns or not set(columns) >= _HEADER:
                raise self.unusable("a second table, or one without time, algbw and busbw (-C leaves them out)")
            self.columns = columns
        elif (wrong := _WRONG_VALUES.match(line)) and int(wrong[1]):
            raise self.wrong(wrong[1])
        elif _END.match(line):
            self.ended = bool(self.columns)

    def row(self, cells: Sequence[str]) -> None:
        """Add a row's point; the columns from ``time`` on are there once, or again for what was reduced in place."""
        columns = self.columns
        if columns[-1] == "timestamp":
            # The timestamp is one column of two words.
            columns, cells = columns[:-1], cells[:-2]
        if len(cells) != len(columns):
            raise self.unusable(f"a row with {len(cells)} of {len(columns)} columns, perhaps cut off")
        pairs = [*zip(columns, cells, strict=True)]
        # Of equal names the first counts: what is in place follows.
        named = dict(reversed(pairs))
        if named.get("redop") == "none" or named.get("root", "-1") != "-1":
            raise self.unusable("a test without an operation, or with a root, and no all-reduce")
        self.kinds.add(" ".join(named[key] for key in ("type", "redop") if key in named))
        for column, cell in pairs:
            if column == "#wrong" and cell != "N/A" and self._number(cell, column):
                raise self.wrong(cell)
        # nccl-tests round a size down to a multiple of the number of ranks, which can give 0.
        if named["time"] == "N/A" or not self._number(named["size"], "size"):
            return
        micros, algorithm, bus = (self._number(named[key], key) for key in ("time", "algbw", "busbw"))
        if not micros:
            raise self.unusable("a time of 0")
        self.points.append((float(named["size"]), micros * 1e-6))
        if algorithm >= _TELLING_GB_S:
            self.rates.append((self.at, algorithm, bus))

    def _number(self, cell: str, column: str) -> float:
        try:
            value = float(cell)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise self.unusable(f"{column} is {cell!r}, not a number of at least 0")
        return value

    def curve(self, file: str) -> Curve:
        """The run, at its end."""
        if not self.points or len(self.kinds) > 1:
            raise self.unusable(f"no times, or several types or operations: {', '.join(sorted(self.kinds))}")
        if len(self.ranks) < 2 or max(self.ranks) + 1 > len(self.ranks):
            raise self.unusable(f"{len(self.ranks)} lines '#  Rank …', and each of two or more ranks has one")
        hosts = Counter(host for host, _ in self.ranks.values())
        gpus = {gpu for _, gpu in self.ranks.values()} - {""}
        if len(gpus) > 1 or len(set(hosts.values())) > 1:
            raise self.unusable("different GPUs, or hosts with different numbers of ranks")
        self._check_factor(len(self.ranks))
        return Curve(
            engine="nccl",
            ranks=len(self.ranks),
            hosts=len(hosts),
            gpu=next(iter(gpus), None),
            points=medians(self.points),
            source=f"{file}, all_reduce_perf of {next(iter(self.kinds))}",
        )

    def _check_factor(self, ranks: int) -> None:
        """An all-reduce has 2 (n - 1) / n times the bandwidth on its links (doc/PERFORMANCE.md of nccl-tests)."""
        wanted = 2 * (ranks - 1) / ranks
        for at, algorithm, bus in self.rates:
            # Both are rounded to two decimals.
            if abs(bus / algorithm - wanted) > _ROUNDED * (1 + wanted) / algorithm + _RELATIVE * wanted:
                self.at = at
                raise self.unusable(
                    f"busbw is {bus / algorithm:.3g} times algbw; of an all-reduce of {ranks} ranks it is {wanted:.3g} "
                    "times"
                )

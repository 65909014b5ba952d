"""Reads the text that nccl-tests' ``all_reduce_perf`` prints (https://github.com/NVIDIA/nccl-tests).

Its columns have changed: before 2.13 there were no ``root`` and an ``error`` of rounding instead of ``#wrong``; since
2.16.7 there is a line with the test's name, since 2.19.2 there may be columns of single iterations. The header's own
names are followed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hpctrain.common.errors import HpctrainError
from hpctrain.control.predict.measurements import Curve, medians
from hpctrain.control.topology.readers.listing import without_terminal

_RANK = re.compile(
    r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device(?:\s+\d+\s+\[[^\]]*\]\s*(.*))?"
)
_WRONG_VALUES = re.compile(r"#?\s*Out of bounds values\s*:\s*(\d+)")
_END = re.compile(r"#?\s*Avg bus bandwidth\s*:")
_TEST = re.compile(r"#\s+Collective test starting:\s*(\S+)")
_HEADER = {"size", "count", "busbw"}
_HEADER_START = re.compile(r"(.*?)#\s*size\b")
# Bandwidths are printed with two decimals, so the ratio of smaller ones is not exact enough.
_TELLING_GB_S = 1.0
_ROUNDED, _RELATIVE = 0.0055, 2e-4
_WHOLE = "run all_reduce_perf again, and keep all that it prints"


def nccl_curves(text: str, where: str) -> list[Curve]:
    """The all-reduces of a text out of place, as NCCL's users mostly run them: a curve for each run.

    Args:
        text: all that was printed. NCCL's own lines may be between, and each line may have in front of it what a
            launcher or a collector of logs puts there: rank, host, pod, date and time.
        where: the file's name for error messages.

    Raises:
        HpctrainError: results were wrong; the text is cut off or damaged, of another test, of several types or
            operations, of groups (``NCCL_TESTS_SPLIT``), or its runs are mixed.
    """
    found: list[Curve] = []
    run = _Run(where, where)
    for number, line in enumerate(_without_prefix(text), start=1):
        run.at = f"{where}:{number}"
        if line.startswith("#") or not line[:1].isdigit():
            run.remark(line)
            if _END.match(line) and run.columns:
                found.append(run.curve())
                run = _Run(where, where)
        elif run.columns and line.split()[0].isdigit():
            run.row(line.split())
    if run.columns:
        raise run.unusable("it ends without '# Avg bus bandwidth': cut off")
    if run.ranks or not found:
        run.at = where
        raise run.unusable("no table of nccl-tests (no line with size, count and busbw)")
    return found


def _without_prefix(text: str) -> Iterator[str]:
    """The lines without what stands before ``#`` in the table's header, whatever words and numbers that holds.

    ``srun -l`` puts a rank there, mpirun a tag (with its job, rank, host or the time), kubectl the pod and the time.
    """
    lines = without_terminal(text).splitlines()
    headers = (_HEADER_START.match(line) for line in lines if _is_header(line))
    prefix = next((_prefix_like(header[1]) for header in headers if header), None)
    for line in lines:
        yield (prefix.sub("", line, count=1) if prefix else line).strip()


def _is_header(line: str) -> bool:
    return set(line.rpartition("# ")[2].split()) >= _HEADER


def _prefix_like(example: str) -> re.Pattern[str] | None:
    """A pattern of prefixes that are built like this one; None for an empty one."""
    if not example.strip():
        return None
    parts = re.findall(r"\w+|\s+|[^\w\s]", example)
    pattern = "".join(
        r"\w+" if re.match(r"\w", part) else r"\s*" if part.isspace() else re.escape(part) for part in parts
    )
    return re.compile(rf"^\s*{pattern}")


@dataclass
class _Run:
    """The part of a run that was read so far.

    Attributes:
        file: the file's name.
        at: the line that is read.
        ranks: the host and the GPU of each.
        points: bytes and seconds.
        rates: the line of each fast enough row, and its algorithm and bus bandwidths.
    """

    file: str
    at: str
    columns: list[str] = field(default_factory=list)
    ranks: dict[int, tuple[str, str]] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    points: list[tuple[float, float]] = field(default_factory=list)
    rates: list[tuple[str, float, float]] = field(default_factory=list)

    def unusable(self, problem: str, hint: str = _WHOLE) -> HpctrainError:
        """The error for a run that does not tell how long an all-reduce takes."""
        return HpctrainError("HT-nccl-tests-not-usable", "{where}: {problem}", hint, where=self.at, problem=problem)

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
            self._rank(int(rank[1]), int(rank[2] or 0), rank[3], (rank[4] or "").strip())
        elif (test := _TEST.match(line)) and not test[1].startswith("all_reduce"):
            raise self.unusable(f"the test is {test[1]}", "valid: all_reduce_perf")
        elif _is_header(line):
            if self.columns:
                raise self.unusable("a second table begins before '# Avg bus bandwidth' of the first")
            self.columns = line.lstrip("# ").split()
            if "time" not in self.columns:
                raise self.unusable("no column time, perhaps times of the CPU (-C)", "measure without -C")
        elif (wrong := _WRONG_VALUES.match(line)) and int(wrong[1]):
            raise self.wrong(wrong[1])

    def _rank(self, number: int, group: int, host: str, gpu: str) -> None:
        if number in self.ranks:
            raise self.unusable(
                f"rank {number} for the second time: several runs, or processes that do not know each other",
                "give one run a file; under mpirun nccl-tests must be built with MPI=1",
            )
        if group:
            raise self.unusable("groups of ranks that ran at the same time", "measure without NCCL_TESTS_SPLIT")
        self.ranks[number] = host, gpu

    def row(self, cells: Sequence[str]) -> None:
        """Add a row's point; the columns from ``time`` on are there once, or again for what was reduced in place."""
        columns = self.columns
        if columns[-1] == "timestamp":
            # The timestamp is one column of two words.
            columns, cells = columns[:-1], cells[:-2]
        if len(cells) != len(columns):
            raise self.unusable(f"a row with {len(cells)} of {len(columns)} columns, perhaps cut off")
        start = columns.index("time")
        named = dict(zip(columns[:start], cells, strict=False))
        if named.get("redop") == "none" or named.get("root", "-1") != "-1":
            raise self.unusable("a test without an operation, or with a root", "valid: all_reduce_perf")
        self.kinds.add(" ".join(named[key] for key in ("type", "redop") if key in named))
        for column, cell in zip(columns, cells, strict=True):
            if column == "#wrong" and cell != "N/A" and self._number(cell, column):
                raise self.wrong(cell)
        # The first time is out of place.
        first = dict(reversed([*zip(columns, cells, strict=True)]))
        if not {"algbw", "busbw"} <= first.keys():
            raise self.unusable("the table has no columns algbw and busbw beside its times")
        # nccl-tests round a size down to a multiple of the number of ranks, which can give 0.
        if first["time"] == "N/A" or not self._number(cells[0], "size"):
            return
        micros, algorithm, bus = (self._number(first[key], key) for key in ("time", "algbw", "busbw"))
        if not micros:
            raise self.unusable("a time of 0")
        self.points.append((float(cells[0]), micros * 1e-6))
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

    def curve(self) -> Curve:
        """The run, at its end."""
        if not self.points:
            raise self.unusable("no row with a time")
        if len(self.kinds) > 1:
            raise self.unusable(f"several types or operations: {', '.join(sorted(self.kinds))}", "measure one")
        if not self.ranks or max(self.ranks) + 1 > len(self.ranks):
            raise self.unusable(f"{len(self.ranks)} lines '#  Rank …', and each rank has one")
        hosts, gpus = (sorted(set(told) - {""}) for told in zip(*self.ranks.values(), strict=True))
        if len(gpus) > 1:
            raise self.unusable(f"different GPUs: {', '.join(gpus)}", "measure on GPUs of one kind")
        if len(set(Counter(host for host, _ in self.ranks.values()).values())) > 1:
            raise self.unusable("hosts with different numbers of ranks", "measure with the same number on each host")
        if len(self.ranks) == 1:
            raise self.unusable("one rank alone", "measure several, such as -g 8; mpirun needs nccl-tests with MPI=1")
        self._check_factor(len(self.ranks))
        return Curve(
            engine="nccl",
            ranks=len(self.ranks),
            hosts=len(hosts),
            gpu=next(iter(gpus), None),
            points=medians(self.points),
            source=f"{self.file}, all_reduce_perf of {next(iter(self.kinds))}",
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
                    "times",
                    "give all_reduce_perf's output with a line for each rank",
                )

"""Reads the text that nccl-tests' ``all_reduce_perf`` prints (https://github.com/NVIDIA/nccl-tests).

Its columns have changed: before 2.13 there were no ``root`` and an ``error`` of rounding instead of ``#wrong``; since
2.16.7 there is a line with the test's name, since 2.19.2 there may be columns of single iterations. The header's own
names are followed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hpctrain.common.errors import HpctrainError
from hpctrain.control.predict.nccl_run import AGAIN, WRONG_RESULTS, Measured, Rank, Run, all_reduces, not_all_reduce
from hpctrain.control.topology.readers.listing import without_terminal

_RANK = re.compile(
    r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device(?:\s+\d+\s+\[[^\]]*\]\s*(.*))?"
)
_WRONG_VALUES = re.compile(r"#?\s*Out of bounds values\s*:\s*(\d+)")
_END = re.compile(r"#?\s*Avg bus bandwidth\s*:")
_TEST = re.compile(r"#\s+Collective test starting:\s*(\S+)")
_HEADER = {"size", "count", "busbw"}
_HEADER_START = re.compile(r"(.*?)#\s*size\b")


@dataclass(kw_only=True)
class _RunTable:
    """A run that is being read, with the columns of its table and the line that it begins on."""

    where: str
    run: Run = field(default_factory=Run)
    columns: list[str] = field(default_factory=list)

    @property
    def begun(self) -> bool:
        """Whether anything of a run was read."""
        return bool(self.run.ranks or self.columns)


def read_nccl_tests(text: str, where: str) -> list[Measured]:
    """The all-reduces of a text, one for each run; runs of other collectives beside them are passed over.

    Args:
        text: all that was printed. NCCL's own lines may be between, and each line may have in front of it what a
            launcher or a collector of logs puts there: rank, host, pod, date and time.
        where: the file's name for error messages.

    Raises:
        HpctrainError: results were wrong; the text is cut off or damaged, of another test, of several types or
            operations, or its runs are mixed.
    """
    runs: list[Run] = []
    table = _RunTable(where=where)
    number = 0
    for number, line in enumerate(_without_prefix(text), start=1):
        if line.startswith("#") or not line[:1].isdigit():
            _remark(table, line, f"{where}:{number}")
            if _END.match(line) and table.columns:
                runs.append(table.run)
                table = _RunTable(where=where)
        elif table.columns and table.run.other is None and line.split()[0].isdigit():
            _row(table, line.split(), f"{where}:{number}")
    if table.columns:
        raise HpctrainError(
            "HT-nccl-tests-damaged",
            "{where}:{line}: it ends without '# Avg bus bandwidth': cut off",
            AGAIN,
            where=where,
            line=number,
        )
    if table.begun or not runs:
        if table.run.other:
            raise table.run.other
        raise HpctrainError(
            "HT-nccl-tests-damaged",
            "{where}: no table of nccl-tests (no line with size, count and busbw)",
            "give the output of nccl-tests' all_reduce_perf, or of `hpctrain bench allreduce --json`",
            where=where,
        )
    return all_reduces(runs, where)


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


def _remark(table: _RunTable, line: str, at: str) -> None:
    run = table.run
    if rank := _RANK.match(line):
        if int(rank[1]) in run.ranks:
            raise HpctrainError(
                "HT-nccl-tests-not-usable",
                "{where}: rank {rank} for the second time: several runs, or processes that do not know each other",
                "give one run a file; under mpirun nccl-tests must be built with MPI=1",
                where=at,
                rank=int(rank[1]),
            )
        run.ranks[int(rank[1])] = Rank(group=rank[2] or "0", host=rank[3], gpu=(rank[4] or "").strip())
    elif (test := _TEST.match(line)) and not test[1].startswith("all_reduce"):
        run.other = not_all_reduce(at, f"the test is {test[1]}")
    elif _is_header(line):
        if table.columns:
            raise HpctrainError(
                "HT-nccl-tests-damaged",
                "{where}: a second table begins before '# Avg bus bandwidth' of the first",
                AGAIN,
                where=at,
            )
        table.columns = line.lstrip("# ").split()
        if "time" not in table.columns:
            raise HpctrainError(
                "HT-nccl-tests-not-usable",
                "{where}: no column time, perhaps times of the CPU (-C)",
                "measure without -C",
                where=at,
            )
    elif (wrong := _WRONG_VALUES.match(line)) and int(wrong[1]):
        raise HpctrainError(
            "HT-nccl-tests-wrong-results",
            "{where}: {count} values out of bounds",
            WRONG_RESULTS,
            where=at,
            count=int(wrong[1]),
        )


def _row(table: _RunTable, cells: Sequence[str], at: str) -> None:
    """Add a row's points, the columns from ``time`` on once or twice."""
    columns = table.columns
    if columns[-1] == "timestamp":
        # The timestamp is one column of two words.
        columns, cells = columns[:-1], cells[:-2]
    if len(cells) != len(columns):
        raise HpctrainError(
            "HT-nccl-tests-damaged",
            "{where}: a row with {cells} of {columns} columns, perhaps cut off",
            AGAIN,
            where=at,
            cells=len(cells),
            columns=len(columns),
        )
    named = dict(zip(columns[: columns.index("time")], cells, strict=False))
    table.run.other = other_collective(named.get("redop"), named.get("root"), at)
    if table.run.other:
        return
    size = _number(cells[0], "size", at)
    table.run.kinds.add(" ".join(named[key] for key in ("type", "redop") if key in named))
    starts = [place for place, column in enumerate(columns) if column == "time"]
    for place, (start, end) in enumerate(zip(starts, [*starts[1:], len(columns)], strict=True)):
        measured = dict(zip(columns[start:end], cells[start:end], strict=True))
        if measured.get("#wrong", "N/A") != "N/A" and _number(measured["#wrong"], "#wrong", at):
            raise HpctrainError(
                "HT-nccl-tests-wrong-results",
                "{where}: {count} wrong values at {size} bytes",
                WRONG_RESULTS,
                where=at,
                count=measured["#wrong"],
                size=cells[0],
            )
        if missing := [key for key in ("algbw", "busbw") if key not in measured]:
            raise HpctrainError(
                "HT-nccl-tests-damaged",
                "{where}: the table has no column {column} for each of its times",
                AGAIN,
                where=at,
                column=missing[0],
            )
        # nccl-tests round a size down to a multiple of the number of ranks, which can give 0.
        if measured["time"] == "N/A" or not size:
            continue
        micros, *rates = (_number(measured[key], key, at) for key in ("time", "algbw", "busbw"))
        table.run.add(place, size, micros, (rates[0], rates[1]), at)


def other_collective(redop: str | None, root: str | None, at: str) -> HpctrainError | None:
    """The error where a row is of another collective: without an operation, or with a root, which a reduce has."""
    if redop == "none":
        return not_all_reduce(at, "a test without an operation, no all-reduce")
    if root is not None and root.strip() != "-1":
        return not_all_reduce(at, f"a test with the root {root.strip()}, no all-reduce")
    return None


def _number(cell: str, column: str, at: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise HpctrainError(
            "HT-nccl-tests-damaged",
            "{where}: {column} is {value!r}, not a number of at least 0",
            AGAIN,
            where=at,
            column=column,
            value=cell,
        )
    return value

"""Measured times of all-reduces by size, which replace assumed constants of a prediction."""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpctrain.common.errors import HpctrainError
from hpctrain.control.predict.nccl_tests import read_nccl_tests

# A row of ``bench allreduce`` that moves no data between ranks.
_COPY = "copy"

_MENDED = "write it again with `hpctrain bench allreduce --json`, or give the output of nccl-tests' all_reduce_perf"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The time of one collective by the size of its buffer.

    Attributes:
        engine: what carried it: ``mpi``, ``gloo``, ``nccl`` …; nccl-tests have ``nccl, in-place`` as well.
        points: bytes of a rank's buffer and seconds, by rising bytes.
        source: the file and the program that measured, for messages.
        gpu: the driver's name of the ranks' GPUs; None where the file has none.
    """

    collective: str
    engine: str
    ranks: int
    hosts: int
    points: tuple[tuple[float, float], ...]
    source: str
    gpu: str | None = None

    def __post_init__(self) -> None:
        assert self.points and self.ranks >= 1 and self.hosts >= 1
        assert all(one < other for (one, _), (other, _) in zip(self.points, self.points[1:], strict=False))

    @property
    def local(self) -> int:
        """Ranks of a host in one collective."""
        return self.ranks // self.hosts

    def in_rack(self, joined: int) -> Curve:
        """The curve, as of one host where NVLink joins the GPUs of all, so many in a rack."""
        return replace(self, hosts=1) if self.ranks <= joined else self

    def at(self, nbytes: float) -> float:
        """Seconds for a buffer of ``nbytes``.

        Between two points along a straight line in a plot with two logarithmic axes; below the first its time, which
        is mostly latency; above the last at the bandwidth that it reached. Nothing takes no time.
        """
        if nbytes <= 0:
            return 0.0
        after = bisect_left(self.points, (nbytes, -math.inf))
        if after == 0:
            return self.points[0][1]
        if after == len(self.points):
            size, seconds = self.points[-1]
            return seconds * (nbytes / size)
        (low, start), (high, end) = self.points[after - 1], self.points[after]
        return start * math.exp(math.log(end / start) * math.log(nbytes / low) / math.log(high / low))


def bench_curves(text: str, where: str) -> list[Curve]:
    """The curves of ``hpctrain bench allreduce --json``, one for each engine and number of ranks.

    Args:
        where: the file's name for error messages.

    Raises:
        HpctrainError: no JSON, or rows without what a curve needs.
    """
    rows = _json(text, where).get("rows")
    if not isinstance(rows, list) or not rows:
        raise HpctrainError("HT-calibration-not-valid", "{where}: no rows", _MENDED, where=where)
    points: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    for number, row in enumerate(rows, start=1):
        at = f"{where}: row {number}"
        engine = row.get("engine") if isinstance(row, dict) else None
        if not isinstance(engine, str) or not engine:
            raise HpctrainError("HT-calibration-not-valid", "{where} has no engine", _MENDED, where=at)
        ranks, hosts = _count(row, "ranks", at), _count({"hosts": 1, **row}, "hosts", at)
        if ranks % hosts:
            raise HpctrainError(
                "HT-calibration-not-valid",
                "{where}: {ranks} ranks cannot be divided equally among {hosts} hosts",
                _MENDED,
                where=at,
                ranks=ranks,
                hosts=hosts,
            )
        point = float(_count(row, "bytes", at)), _seconds(row, at)
        if engine != _COPY:
            points[engine, ranks, hosts].append(point)
    if not points:
        raise HpctrainError(
            "HT-calibration-not-valid",
            "{where}: only rows of engine {engine!r}, which moves nothing between ranks",
            _MENDED,
            where=where,
            engine=_COPY,
        )
    return [
        _curve(own, engine=engine, ranks=ranks, hosts=hosts, source=f"{where}, hpctrain bench allreduce")
        for (engine, ranks, hosts), own in points.items()
    ]


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HpctrainError(
            "HT-file-not-json",
            "{where}: not JSON: {problem}",
            f"it is damaged or cut off: {_MENDED}",
            where=where,
            problem=str(error),
        ) from error
    return found if isinstance(found, dict) else {}


def nccl_curves(text: str, where: str) -> list[Curve]:
    """The curves of what nccl-tests' ``all_reduce_perf`` printed: of each run out-of-place, then in-place, as measured.

    Args:
        where: the file's name for error messages.
    """
    return [
        _curve(
            points,
            engine=engine,
            ranks=found.ranks,
            hosts=found.hosts,
            gpu=found.gpu,
            source=f"{where}, all_reduce_perf of {found.kind}",
        )
        for found in read_nccl_tests(text, where)
        for engine, points in (("nccl", found.out_of_place), ("nccl, in-place", found.in_place))
        if points
    ]


def _curve(points: Iterable[tuple[float, float]], **measured: Any) -> Curve:
    """A curve of these points; of several for one size it has the median."""
    by_size: dict[float, list[float]] = defaultdict(list)
    for size, seconds in points:
        by_size[size].append(seconds)
    median = tuple((size, statistics.median(by_size[size])) for size in sorted(by_size))
    return Curve(collective="all-reduce", points=median, **measured)


def _count(row: Mapping[str, Any], key: str, at: str) -> int:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise HpctrainError(
            "HT-calibration-not-valid",
            "{where}: {key} is {value!r}, not a whole number of at least 1",
            _MENDED,
            where=at,
            key=key,
            value=value,
        )
    return value


def _seconds(row: Mapping[str, Any], at: str) -> float:
    value = row.get("median_s")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise HpctrainError(
            "HT-calibration-not-valid",
            "{where}: median_s is {value!r}, not a number of seconds above 0",
            _MENDED,
            where=at,
            value=value,
        )
    return float(value)

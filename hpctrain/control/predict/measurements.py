"""What was measured, and replaces assumed constants: step times over batches, and curves of all-reduces."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from hpctrain.common.cluster.gpu_models import gpu_reported_as, gpus
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.checked_yaml import Section
from hpctrain.common.recipes.keys import Count, NotNegative, Positive
from hpctrain.control.predict.compute import CPU, Precision


class SweepRow(Section):
    """The steps of one batch.

    Attributes:
        batch: the number of samples of a rank.
        spread: of the logarithm of its time, between rounds.
    """

    batch: Count
    median_s: Positive
    spread: NotNegative


class Sweep(Section):
    """Step times without communication, as ``hpctrain bench step --sweep --json`` writes them."""

    model: str
    device: str = Field(description="name of a GPU that predictions know, or cpu")
    precision: Precision = "float32"
    ranks: Count = Field(description="that ran at the same time, on one host")
    cores: Count | None = Field(None, description="of the host, which they shared")
    image_size: Count | None = None
    rows: tuple[SweepRow, ...] = Field(min_length=2)
    fixed_s: float = Field(description="a of t(b) = a + c b")
    per_sample_s: float = Field(description="c of t(b) = a + c b")


def make_sweep(
    measured: Mapping[str, Any], model: str, *, image_size: int | None, precision: Precision = "float32"
) -> Sweep:
    """A sweep from the times of each round.

    Args:
        measured: ``seconds`` of a step in each round, by the batch; ``gpu``: what its driver calls it, None for the
            host's cores; ``ranks``, which ran at the same time on the ``cores`` of a host.
        image_size: pixels a side; only residual networks have images.

    Raises:
        HpctrainError: a GPU that predictions do not know.
    """
    gpu = measured["gpu"]
    device = CPU if gpu is None else gpu_reported_as(gpu)
    if device is None:
        raise HpctrainError(
            "HT-choice-unknown",
            "predictions do not know the GPU {gpu!r}",
            f"known: {', '.join(sorted(gpus()))}",
            gpu=gpu,
        )
    rows = [
        SweepRow(batch=int(batch), median_s=statistics.median(times), spread=float(np.log(times).std()))
        for batch, times in measured["seconds"].items()
    ]
    slope, constant = np.polyfit([row.batch for row in rows], [row.median_s for row in rows], 1)
    return Sweep(
        model=model,
        device=device,
        precision=precision,
        ranks=measured["ranks"],
        cores=measured["cores"],
        image_size=image_size,
        rows=tuple(sorted(rows, key=lambda row: row.batch)),
        fixed_s=float(constant),
        per_sample_s=float(slope),
    )


class _BenchmarkRow(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class ReducedRow(_BenchmarkRow):
    """A row of ``hpctrain bench allreduce --json``."""

    engine: str = Field(min_length=1)
    ranks: int = Field(ge=1)
    hosts: int = Field(1, ge=1)
    bytes: int = Field(ge=1)
    median_s: float = Field(gt=0)


class LoadedRow(_BenchmarkRow):
    """A row of ``hpctrain bench loader --json``."""

    variant: str
    workers: int = Field(ge=0)
    samples_per_s: float = Field(gt=0)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The time of an all-reduce by the size of its buffer.

    Attributes:
        engine: what carried it: ``mpi``, ``gloo``, ``nccl`` …
        points: bytes of a rank's buffer and seconds, by rising bytes.
        source: the file and the program that measured, for messages.
    """

    engine: str
    ranks: int
    hosts: int
    points: tuple[tuple[float, float], ...]
    source: str

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
        return interpolated(self.points, nbytes) * max(1.0, nbytes / self.points[-1][0])


def interpolated(points: Sequence[tuple[float, float]], size: float) -> float:
    """The value at a size: between two points along a straight line in a plot with two logarithmic axes, and beyond the
    first or the last one its own.

    Args:
        points: sizes and values, by rising sizes.
    """
    if size <= points[0][0]:
        return points[0][1]
    if size >= points[-1][0]:
        return points[-1][1]
    after = bisect_right(points, (size, math.inf))
    (low, start), (high, end) = points[after - 1], points[after]
    return start * math.exp(math.log(size / low) / math.log(high / low) * math.log(end / start))


def bench_curves(rows: Sequence[ReducedRow], where: str) -> list[Curve]:
    """The curves of ``hpctrain bench allreduce``, one for each engine and number of ranks.

    Args:
        where: the file's name for messages.
    """
    points: dict[tuple[str, int, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        # A copy moves no data between ranks.
        if row.engine != "copy":
            points[row.engine, row.ranks, row.hosts][float(row.bytes)].append(row.median_s)
    return [
        Curve(
            engine=engine,
            ranks=ranks,
            hosts=hosts,
            points=tuple((size, statistics.median(times)) for size, times in sorted(measured.items())),
            source=f"{where}, hpctrain bench allreduce",
        )
        for (engine, ranks, hosts), measured in points.items()
    ]

"""What was measured, and corrects a prediction: step times over batches, curves of all-reduces, rates of loaders."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpctrain.common.cluster.gpu_models import gpu_reported_as, gpus
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.checked_yaml import Section
from hpctrain.common.files.regular import read_text
from hpctrain.common.recipes.keys import Count, NotNegative, Positive
from hpctrain.common.workloads.workload import load_workload
from hpctrain.control.predict.compute import CPU, Compute, Device, Precision, compute
from hpctrain.control.predict.values import Constant, Values, drawn
from hpctrain.control.topology.fabric import Floats

_HOW = "hpctrain bench step --sweep --json > sweep.json; hpctrain bench allreduce --json > curves.json"
# The least standard deviation of the logarithm of a measured step time.
_LEAST_ERROR = 0.01
_MOST_BYTES = 2**26


class SweepRow(Section):
    """The steps of one batch of a rank; ``spread`` is of the logarithm of their time, between rounds."""

    batch: Count
    median_s: Positive
    spread: NotNegative


class Sweep(Section):
    """Step times without communication, as ``hpctrain bench step --sweep --json`` writes them."""

    # Files of earlier versions have further keys.
    model_config = ConfigDict(extra="ignore")

    model: str
    device: str = Field(description="name of a GPU that predictions know, or cpu")
    precision: Precision = "float32"
    ranks: Count = Field(description="that ran at the same time, on one host")
    cores: Count | None = Field(None, description="of the host, which they shared")
    image_size: Count | None = None
    rows: tuple[SweepRow, ...] = Field(min_length=2)

    def modelled_s(self, batch: float, values: Values) -> Floats:
        """What the roofline says of a step with so many samples a rank, (columns,)."""
        device = Device(name=self.device, precision=self.precision, software="eager")
        if self.device == CPU:
            device = Device(name=CPU, precision=self.precision, ranks=self.ranks)
        return compute(load_workload(self.model, image_size=self.image_size), batch, device, values).total


def make_sweep(
    measured: Mapping[str, Any], model: str, *, image_size: int | None, precision: Precision = "float32"
) -> Sweep:
    """A sweep from the times of each round.

    Args:
        measured: ``seconds`` of a step in each round, by the batch; ``gpu``: what its driver calls it, None for the
            host's cores; ``ranks``, which ran at the same time on the ``cores`` of a host.
        image_size: pixels a side; only residual networks have images.
    """
    gpu = measured["gpu"]
    device = CPU if gpu is None else gpu_reported_as(gpu)
    if device is None:
        known = f"known: {', '.join(sorted(gpus()))}"
        raise HpctrainError("HT-choice-unknown", "predictions do not know the GPU {gpu!r}", known, gpu=gpu)
    rows = [
        SweepRow(batch=int(batch), median_s=statistics.median(times), spread=float(np.log(times).std()))
        for batch, times in measured["seconds"].items()
    ]
    return Sweep(
        model=model,
        device=device,
        precision=precision,
        ranks=measured["ranks"],
        cores=measured["cores"],
        image_size=image_size,
        rows=tuple(sorted(rows, key=lambda row: row.batch)),
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
    """The time of an all-reduce by an engine: bytes of a rank's buffer and seconds, by rising bytes."""

    engine: str
    ranks: int
    hosts: int
    points: tuple[tuple[float, float], ...]
    source: str

    @property
    def local(self) -> int:
        """Ranks of a host in one collective."""
        return self.ranks // self.hosts

    def in_rack(self, joined: int) -> Curve:
        """The curve, as of one host where NVLink joins the GPUs of all, so many in a rack."""
        return replace(self, hosts=1) if self.ranks <= joined else self

    def at(self, nbytes: float) -> float:
        """Seconds for a buffer: below the first point its time, which is mostly latency, and above the last one at the
        bandwidth that it reached.
        """
        return interpolated(self.points, nbytes) * max(1.0, nbytes / self.points[-1][0])


def interpolated(points: Sequence[tuple[float, float]], size: float) -> float:
    """The value at a size: between two points along a straight line in a plot with two logarithmic axes, and beyond the
    first or the last one its own; points are sizes and values, by rising sizes.
    """
    if size <= points[0][0]:
        return points[0][1]
    if size >= points[-1][0]:
        return points[-1][1]
    after = bisect_right(points, (size, math.inf))
    (low, start), (high, end) = points[after - 1], points[after]
    return start * math.exp(math.log(size / low) / math.log(high / low) * math.log(end / start))


def bench_curves(rows: Sequence[ReducedRow], path: Path) -> list[Curve]:
    """The curves of a file of ``hpctrain bench allreduce``, one for each engine and number of ranks."""
    points: dict[tuple[str, int, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.ranks % row.hosts:
            raise _not_valid("ranks that cannot be divided equally among their hosts", path)
        # A copy moves no data between ranks.
        if row.engine != "copy":
            points[row.engine, row.ranks, row.hosts][float(row.bytes)].append(row.median_s)
    if not points:
        raise _not_valid("only rows of the engine 'copy', which moves nothing between ranks", path)
    return [
        Curve(
            engine=engine,
            ranks=ranks,
            hosts=hosts,
            points=tuple((size, statistics.median(times)) for size, times in sorted(measured.items())),
            source=f"{path}, hpctrain bench allreduce",
        )
        for (engine, ranks, hosts), measured in points.items()
    ]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Step times of one node over batches, all-reduces, and samples a second of a rank's input, by its workers."""

    sweeps: tuple[Sweep, ...] = ()
    curves: tuple[Curve, ...] = ()
    loaded: Mapping[int, float] = field(default_factory=dict)

    def require_fits(self, network: str, device: str, precision: str) -> None:
        """Refuse steps of another network, device or precision."""
        predicted = {"network": network, "device": device, "precision": precision}
        for sweep in self.sweeps:
            measured = {"network": sweep.model, "device": sweep.device, "precision": sweep.precision}
            for kind, wanted in predicted.items():
                if measured[kind] != wanted:
                    raise HpctrainError(
                        "HT-calibration-mismatch",
                        "--calibration: steps were measured with the {kind} {found}, but {wanted} is to be predicted",
                        f"leave the file out; or hpctrain bench step --sweep --json measures {wanted}, where its "
                        "--model or --precision has that",
                        kind=kind,
                        found=measured[kind],
                        wanted=wanted,
                    )

    def values(self, constants: Mapping[str, Constant]) -> Values:
        """The constants in many draws; of a step that was measured, only what is between its batches is uncertain."""
        if not self.sweeps:
            return drawn(constants)
        plain = drawn(constants, count=0)
        off = [self._off(index, plain)[0] for index in range(len(self._rows))]
        between = [abs(one - other) / 4 for one, other in pairwise(off)]
        measured = {
            "spread": max(_LEAST_ERROR, *between, *(row.spread for _, row in self._rows)),
            "kind": "measured",
            "source": f"bench step --sweep of {', '.join(dict.fromkeys(sweep.model for sweep in self.sweeps))}",
        }
        return drawn({**constants, "step_residual": constants["step_residual"].model_copy(update=measured)})

    def corrected(self, modelled: Compute, batch: float, values: Values) -> Compute:
        """A modelled step, times what measured ones of about this batch took over what the model says of them.

        What both have in common drops out, as with curves of all-reduces.
        """
        if not self.sweeps:
            return modelled
        batches = [math.log(row.batch) for _, row in self._rows]
        place = float(np.interp(math.log(batch), batches, np.arange(len(batches))))
        low, high = math.floor(place), math.ceil(place)
        factor = np.exp(self._off(low, values) * (1 - place + low) + self._off(high, values) * (place - low))
        return Compute(**{name: seconds * factor for name, seconds in vars(modelled).items()})

    @cached_property
    def _rows(self) -> list[tuple[Sweep, SweepRow]]:
        return sorted(((sweep, row) for sweep in self.sweeps for row in sweep.rows), key=lambda pair: pair[1].batch)

    def _off(self, index: int, values: Values) -> Floats:
        """The logarithm of what a measured step took over what the model says of it, (columns,)."""
        sweep, row = self._rows[index]
        found: Floats = np.log(row.median_s / sweep.modelled_s(row.batch, values))
        return found


class _File(BaseModel):
    """What ``hpctrain bench … --json`` writes, as far as predictions use it."""

    sweeps: tuple[Sweep, ...] = ()
    rows: tuple[ReducedRow, ...] | tuple[LoadedRow, ...] = ()


def read_calibration(paths: Sequence[Path]) -> Calibration:
    """The measurements of several files: of ``bench step --sweep``, ``bench allreduce`` and ``bench loader``.

    Raises:
        HpctrainError: a file that cannot be read, is cut off, or is none of these.
    """
    sweeps: list[Sweep] = []
    curves: list[Curve] = []
    loaded: dict[int, float] = {}
    for path in paths:
        try:
            content = _File.model_validate_json(read_text(path, "calibration", _HOW, limit=_MOST_BYTES))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise _not_valid(": ".join([*map(str, first["loc"]), first["msg"]]), path) from error
        sweeps += content.sweeps
        if reduced := [row for row in content.rows if isinstance(row, ReducedRow)]:
            curves += bench_curves(reduced, path)
        passes = [row for row in content.rows if isinstance(row, LoadedRow) and row.variant == "hpctrain"]
        loaded |= {row.workers: row.samples_per_s for row in passes}
        if not (content.sweeps or content.rows):
            raise _not_valid("neither sweeps nor rows of a benchmark", path)
    return Calibration(sweeps=tuple(sweeps), curves=tuple(curves), loaded=loaded)


def _not_valid(problem: str, path: Path) -> HpctrainError:
    return HpctrainError(
        "HT-calibration-not-valid", "{path} is not a whole calibration: {problem}", _HOW, path=path, problem=problem
    )

"""Reads the JSON that nccl-tests write with ``-J FILE.json`` (since 2.17, https://github.com/NVIDIA/nccl-tests).

``src/util.cu`` there writes it: ``args``, ``config`` with the ``devices`` of the ranks, and ``results`` with a row a
size. For a process with several GPUs it lists only the first device.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from hpctrain.common.errors import HpctrainError
from hpctrain.control.predict.nccl_run import AGAIN, WRONG_RESULTS, Measured, Rank, Run, all_reduces, not_all_reduce
from hpctrain.control.predict.nccl_tests import other_collective

_Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Times(BaseModel):
    time: _Rate
    alg_bw: _Rate
    bus_bw: _Rate
    nwrong: _Rate | None = None


class _SizeRow(BaseModel):
    size: Annotated[int, Field(ge=0)]
    type: str
    redop: str
    root: str
    out_of_place: _Times | None = None
    in_place: _Times | None = None


class _RankDevice(BaseModel):
    rank: Annotated[int, Field(ge=0)]
    group: int
    hostname: str
    device_info: str = ""


class _RunConfig(BaseModel):
    nthreads: Annotated[int, Field(ge=1)]
    ngpus: Annotated[int, Field(ge=1)]
    devices: Annotated[list[_RankDevice], Field(min_length=1)]


class _OutOfBounds(BaseModel):
    count: int


class _Report(BaseModel):
    args: list[str] = Field(min_length=1)
    config: _RunConfig
    results: list[_SizeRow]
    out_of_bounds: _OutOfBounds


def is_nccl_report(found: dict[str, Any]) -> bool:
    """Whether a JSON object is a report of nccl-tests."""
    return "nccl_version" in found and "config" in found


def read_nccl_report(found: dict[str, Any], where: str) -> list[Measured]:
    """The all-reduce of a report.

    Args:
        found: the JSON object that the file holds.
        where: the file's name for error messages.

    Raises:
        HpctrainError: it lacks what a curve needs, is of another test, or results were wrong.
    """
    # A run that was ended early has written only a part of these.
    for key in ("results", "out_of_bounds"):
        if key not in found:
            raise HpctrainError(
                "HT-nccl-tests-damaged", "{where}: it has no {key}: the run did not end", AGAIN, where=where, key=key
            )
    try:
        report = _Report.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        why = "times of the CPU (-C)" if key.endswith(".time") and first["type"] == "missing" else first["msg"]
        raise HpctrainError(
            "HT-nccl-tests-damaged", "{where}: {key}: {problem}", AGAIN, where=where, key=key, problem=why
        ) from error
    if report.out_of_bounds.count:
        raise HpctrainError(
            "HT-nccl-tests-wrong-results",
            "{where}: {count} values out of bounds",
            WRONG_RESULTS,
            where=where,
            count=report.out_of_bounds.count,
        )
    run = Run(ranks=_ranks(report.config, where))
    test = PurePath(report.args[0]).name
    if "_perf" in test and not test.startswith("all_reduce"):
        run.other = not_all_reduce(where, f"the test is {test}")
    for number, row in enumerate(report.results if run.other is None else (), start=1):
        _add(run, row, f"{where}: results[{number - 1}]")
    return all_reduces([run], where)


def _ranks(config: _RunConfig, where: str) -> dict[int, Rank]:
    """All ranks: those of a process follow its first one, on the same host and in the same group."""
    process = config.nthreads * config.ngpus
    numbers = sorted(device.rank for device in config.devices)
    if len(set(numbers)) < len(numbers):
        raise HpctrainError(
            "HT-nccl-tests-not-usable",
            "{where}: a rank for the second time",
            "under mpirun nccl-tests must be built with MPI=1",
            where=where,
        )
    # Consecutive numbers mean that this version lists every rank.
    each = 1 if numbers == list(range(len(numbers))) and len(numbers) > 1 else process
    return {
        device.rank + place: Rank(group=str(device.group), host=device.hostname, gpu=device.device_info.strip())
        for device in config.devices
        for place in range(each)
    }


def _add(run: Run, row: _SizeRow, at: str) -> None:
    run.other = run.other or other_collective(row.redop, row.root, at)
    run.kinds.add(f"{row.type} {row.redop}")
    for place, times in enumerate((row.out_of_place, row.in_place)):
        if times is None or not row.size:
            continue
        if times.nwrong:
            raise HpctrainError(
                "HT-nccl-tests-wrong-results",
                "{where}: {count:g} wrong values at {size} bytes",
                WRONG_RESULTS,
                where=at,
                count=times.nwrong,
                size=row.size,
            )
        run.add(place, row.size, times.time, (times.alg_bw, times.bus_bw), at)

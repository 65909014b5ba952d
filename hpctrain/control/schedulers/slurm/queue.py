"""Jobs as Slurm knows them, from ``squeue`` and, once that has forgotten them, ``sacct``."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from hpctrain.common.cluster.programs import program_output, run_program
from hpctrain.common.errors import HpctrainError
from hpctrain.control.schedulers.jobs import JobState, slurm_seconds

# Without a controller squeue tries for 18 s (Slurm 22.05) before it fails.
_SECONDS = 30.0
_TIME_DIGITS = 11
# A character that no name holds: a work directory may have blanks, bars and even line breaks.
_SEPARATOR = "\x1f"
# Field and width of squeue --Format, of which 20.11 and every later version has all. What is longer is cut off; what is
# shorter is filled up, so that wide fields cost where an array has thousands of tasks.
_SQUEUE = {
    "JobID": 64,
    "State": 64,
    "Reason": 256,
    "StartTime": 64,
    "TimeUsed": 64,
    "TimeLimit": 64,
    "NodeList": 512,
    "exit_code": 64,
    "Command": 1024,
    "WorkDir": 1024,
}
_SACCT = ("JobIDRaw", "State", "Reason", "Start", "Elapsed", "Timelimit", "NodeList", "ExitCode", "WorkDir")


def job_states(
    ids: Collection[str] | None, *, user: int | None = None, seconds: float = _SECONDS
) -> Sequence[JobState]:
    """The jobs with these numbers that Slurm knows, sorted by number; of an array those of its tasks.

    Args:
        ids: job numbers that :func:`hpctrain.control.schedulers.jobs.is_job_id` accepts; None for all live jobs of a
            ``user``, by number, and those that ended in the last few minutes.
        seconds: how long Slurm may take to answer.

    Raises:
        HpctrainError: Slurm does not answer, or is not on this host.
    """
    if ids is None:
        return _squeue(f"--user={user}", seconds)
    if not ids:
        return []
    known = {state.id: state for state in _squeue(f"--jobs={','.join(sorted(ids))}", seconds)}
    if forgotten := sorted({*ids} - known.keys()):
        known = {**{state.id: state for state in _sacct(forgotten, seconds)}, **known}
    return sorted(known.values(), key=_order)


def _order(state: JobState) -> int:
    return int(state.id)


def _squeue(which: str, seconds: float) -> list[JobState]:
    # The separator is each field's suffix.
    fields = ",".join(f"{field}:{width}{_SEPARATOR}" for field, width in _SQUEUE.items())
    arguments = ("--states=all", "--noheader", f"--Format={fields}")
    done = run_program("squeue", which, *arguments, seconds=seconds, environment=_environment())
    # squeue reports an unknown job only if a single number was asked for.
    if "Invalid job id" in done.stderr:
        return []
    if done.returncode != 0:
        raise HpctrainError(
            "HT-slurm-command-failed",
            "squeue failed: {reason}",
            "ask Slurm itself with: scontrol ping",
            exit_code=1,
            # The last line says the most; the ones before it say how the client went there.
            reason=(done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1],
        )
    return read_jobs("squeue", done.stdout)


def _squeue_state(row: dict[str, str]) -> JobState:
    # The format of wait(2): the exit status is above the signal.
    status = int(row["exit_code"])
    return JobState(
        id=row["JobID"],
        state=row["State"],
        reason="" if row["Reason"] == "None" else row["Reason"],
        start=_time(row["StartTime"]),
        seconds=slurm_seconds(row["TimeUsed"]) or 0,
        limit_seconds=slurm_seconds(row["TimeLimit"]),
        nodes=row["NodeList"],
        exit_code=status >> 8,
        signal=status & 0x7F,
        command="" if row["Command"] == "(null)" else row["Command"],
        directory=Path(row["WorkDir"]),
    )


def _sacct(ids: Sequence[str], seconds: float) -> list[JobState]:
    """The jobs that the accounting remembers; none where there is no accounting."""
    arguments = ("--allocations", "--noheader", "--parsable", f"--delimiter={_SEPARATOR}", f"--jobs={','.join(ids)}")
    fields = f"--format={','.join(_SACCT)}"
    return read_jobs("sacct", program_output("sacct", *arguments, fields, seconds=seconds, environment=_environment()))


def _sacct_state(row: dict[str, str]) -> JobState:
    exit_code, _, signal = row["ExitCode"].partition(":")
    return JobState(
        id=row["JobIDRaw"],
        # The state may include who cancelled a job: CANCELLED by 1000.
        state=row["State"].partition(" ")[0],
        reason="" if row["Reason"] == "None" else row["Reason"],
        start=_time(row["Start"]),
        seconds=slurm_seconds(row["Elapsed"]) or 0,
        limit_seconds=slurm_seconds(row["Timelimit"]),
        nodes="" if row["NodeList"] == "None assigned" else row["NodeList"],
        exit_code=int(exit_code),
        signal=int(signal or 0),
        directory=Path(row["WorkDir"]),
    )


def read_jobs(program: Literal["squeue", "sacct"], text: str) -> list[JobState]:
    """The jobs in what ``program`` prints in the format of :func:`job_states`, sorted by number.

    Raises:
        HpctrainError: it is not such a text.
    """
    fields, state = {"squeue": (tuple(_SQUEUE), _squeue_state), "sacct": (_SACCT, _sacct_state)}[program]
    try:
        # The last field of a job may hold line breaks. Sorting also checks that each number is one.
        values = [value.strip(" ") for value in text.replace(f"{_SEPARATOR}\n", _SEPARATOR).split(_SEPARATOR)[:-1]]
        rows = (values[start : start + len(fields)] for start in range(0, len(values), len(fields)))
        return sorted((state(dict(zip(fields, row, strict=True))) for row in rows), key=_order)
    except ValueError as error:
        raise HpctrainError(
            "HT-slurm-command-failed",
            "{program} did not print a list of jobs: {reason}",
            f"see what it prints with: {program}",
            exit_code=1,
            program=program,
            reason=error,
        ) from error


def _environment() -> dict[str, str]:
    """This process's, with times since the epoch."""
    return {**os.environ, "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}


def _time(text: str) -> float | None:
    # Longer numbers are beyond what a calendar has.
    return float(text) if text.isdecimal() and len(text) <= _TIME_DIGITS else None

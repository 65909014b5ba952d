"""``hpctrain logs``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.cli.options import Target
from hpctrain.common.errors import HpctrainError
from hpctrain.report.output import answer, tell

if TYPE_CHECKING:
    from hpctrain.control.schedulers.find_run import FoundRun
    from hpctrain.report.logs import JobLogs, RankLogs

_POLL_SECONDS = 0.5
# How often Slurm is asked whether the run goes on.
_STATE_SECONDS = 10.0


def logs(
    target: Target = "last",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the run to its end, across requeues.")] = False,
    rank: Annotated[str | None, typer.Option(metavar="LIST", help="Only these ranks: 0, or 0-3,7.")] = None,
    job: Annotated[bool, typer.Option("--job", help="The logs of the jobs instead of those of the ranks.")] = False,
) -> None:
    """Print what the ranks of a run print. A line that several ranks printed comes once, with their numbers."""
    from hpctrain.control.schedulers.find_run import find_run

    found = find_run(target)
    if found.tasks:
        first = next(iter(found.tasks.values())).path
        raise HpctrainError(
            "HT-run-is-several",
            "{target} is an array of runs",
            f"name one task of it: {first}, or JOBID_TASK",
            target=target,
        )
    if job and rank:
        raise HpctrainError(
            "HT-options-exclude-each-other",
            "--rank is for the logs of ranks, and --job for those of jobs",
            "leave out one of them",
        )
    reader = _reader(found, rank, job=job)
    printed = False
    try:
        for lines in _until_end(found, reader, follow):
            printed = True
            answer("\n".join(lines))
    except KeyboardInterrupt:
        return
    if not printed:
        tell("hpctrain: nothing has been printed yet" + ("" if job else "; --job shows what the job printed"))


def _reader(found: FoundRun, rank: str | None, *, job: bool) -> RankLogs | JobLogs:
    from hpctrain.common.run.directory import read_model
    from hpctrain.common.run.plan import Plan
    from hpctrain.report.logs import JobLogs, RankLogs

    if job:
        return JobLogs(found)
    plan = read_model(found.directory.plan, Plan)
    return RankLogs(found.directory, _ranks(rank), plan.ranks, epochs=plan.recipe is not None)


def _ranks(text: str | None) -> frozenset[int] | None:
    if text is None:
        return None
    from ClusterShell.RangeSet import RangeSet, RangeSetException

    try:
        return frozenset(RangeSet(text).intiter())
    except (RangeSetException, ValueError) as error:
        raise HpctrainError(
            "HT-option-bad-value",
            "--rank {text}: {reason}",
            "numbers and ranges with commas between them: 0-3,7",
            text=text,
            reason=error,
        ) from error


def _until_end(found: FoundRun, reader: RankLogs | JobLogs, follow: bool) -> Iterator[list[str]]:
    """The new lines, again and again while the run may print more."""
    checked, goes_on = float("-inf"), follow
    while True:
        if goes_on and time.monotonic() - checked > _STATE_SECONDS:
            checked, goes_on = time.monotonic(), _goes_on(found)
        # Read after the check, so that nothing printed between the last read and the run's end is missed.
        if lines := list(reader.lines(last=not goes_on)):
            yield lines
        elif not goes_on:
            return
        if goes_on:
            time.sleep(_POLL_SECONDS)


def _goes_on(found: FoundRun) -> bool:
    from hpctrain.report.status import RunStatus, read_status

    run, problem = read_status(found)
    # Without Slurm's answer, the run is not known to have ended.
    return problem is not None or (isinstance(run, RunStatus) and run.state in ("running", "waiting"))

"""``hpctrain status``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.common.files.printable import shortened
from hpctrain.common.run.directory import RUNS
from hpctrain.report.output import answer, answer_json, duration, table_width, tell

if TYPE_CHECKING:
    from hpctrain.report.status import RunStatus

# A longer name of a value that a script logs moves its own row alone.
_WIDEST_NAME, _LONGEST_NAME = 60, 500
# Beyond these the values, and the lines about faults and stalls, are counted; --json has all of them.
_MOST_VALUES, _MOST_LINES = 100, 10


def status(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN_DIR|JOBID|last]",
            help="A run's directory, a job (12, or 12_3), or the last in hpctrain-runs/; by default all are listed.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON with stable keys.")] = False,
) -> None:
    """Show a run's state, step, loss, speed and remaining time. Without a run, list those in hpctrain-runs/.

    The list has a line for each run: its state, steps, newest metric, last event, duration, and why it is in its state
    or in which settings it differs from the other runs of its script or recipe.
    """
    if target is None:
        _show_runs(as_json=as_json)
        return
    from hpctrain.control.schedulers.run_jobs import find_run
    from hpctrain.report.status import read_status

    found, problem = read_status(find_run(target))
    if problem:
        tell(f"hpctrain: warning: without what the scheduler knows of the jobs: {problem}")
    if as_json:
        answer_json(found.model_dump(mode="json"))
    else:
        answer(_table(found))


def _show_runs(*, as_json: bool) -> None:
    from hpctrain.report.status import list_runs, runs_text

    rows, problem = list_runs(RUNS)
    if problem:
        tell(f"hpctrain: warning: without what the scheduler knows of the jobs: {problem}")
    if as_json:
        answer_json({"runs": [row.model_dump(mode="json") for row in rows]})
    elif rows:
        answer(runs_text(rows, RUNS, table_width()))
    else:
        from hpctrain.control.schedulers.run_jobs import NO_RUNS_HINT

        tell(f"hpctrain: there is no run in {RUNS.absolute()}; {NO_RUNS_HINT}")


def _table(run: RunStatus) -> str:
    rows = [
        (run.title, " ".join([run.state, f"(attempt {run.attempt})" if (run.attempt or 1) > 1 else ""]).strip()),
        ("", run.message),
        ("resume with", run.resume),
        ("directory", run.run_dir),
        ("jobs", ", ".join(run.job_ids)),
        ("hosts", _hosts(run)),
        ("step", _of(run.step, run.steps)),
        ("epoch", _of(run.epoch, run.epochs)),
        ("step loss", _figure(run.step_loss, "{:.4g}")),
        # The last epoch's figures have the names of the summary.
        ("train loss", _figure(run.train_loss)),
        ("test accuracy", _figure(run.test_accuracy)),
        # A script may call what it logs like another row, or anything else.
        *(
            (
                shortened(name if name.isprintable() else repr(name), _LONGEST_NAME),
                _figure(value, "{:.6g}") or "not finite",
            )
            for name, value in islice(run.logged.items(), _MOST_VALUES)
        ),
        ("", f"and {more:,} more values" if (more := len(run.logged) - _MOST_VALUES) > 0 else None),
        ("throughput", None if run.samples_per_s is None else f"{run.samples_per_s:,.0f} samples/s"),
        ("elapsed", duration(run.elapsed_s)),
        ("remaining", _remaining(run)),
        ("last event", _last_event(run)),
        ("survived", run.survived),
        ("stalls", run.stalls),
        ("excluded", run.excluded),
    ]
    width = min(max(len(name) for name, _ in rows), _WIDEST_NAME)
    return "\n".join(
        f"{name if first else '':<{width}}  {line}" for name, value in rows if value for first, line in _lines(value)
    )


def _lines(value: str | tuple[str, ...]) -> Iterator[tuple[bool, str]]:
    """Each line, and whether it is the first."""
    from hpctrain.report.record import first_of

    for number, line in enumerate([value] if isinstance(value, str) else first_of(value, _MOST_LINES)):
        yield number == 0, shortened(line)


def _figure(value: float | None, form: str = "{:.4f}") -> str | None:
    return None if value is None else form.format(value)


def _of(number: int | None, total: int | None) -> str | None:
    if number is None:
        return None
    return f"{number:,}" if total is None else f"{number:,} of {total:,}"


def _hosts(run: RunStatus) -> str:
    from hpctrain.common.cluster.host_list import fold_hosts

    ranks = "" if run.ranks is None else f"{run.ranks} rank{'s' if run.ranks != 1 else ''}"
    return ", ".join(filter(None, [fold_hosts(run.hosts), ranks]))


def _remaining(run: RunStatus) -> str | None:
    parts = [duration(run.remaining_s)]
    if run.job_remaining_s is not None:
        parts.append(f"the job ends in {duration(max(0.0, run.job_remaining_s))}")
    return "; ".join(part for part in parts if part) or None


def _last_event(run: RunStatus) -> str | None:
    ago = duration(run.last_event_s)
    return f"{ago} ago{': the run is silent' if run.silent else ''}" if ago else None

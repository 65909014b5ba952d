"""``hpctrain cancel``."""

from __future__ import annotations

from typing import Annotated

import typer

from hpctrain.cli.options import Target
from hpctrain.report.output import answer

# The launcher first waits for the ranks to stop, and then kills those that are left.
_GRACE_SECONDS = 30.0


def cancel(
    target: Target = "last",
    save_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="How long ranks in a job or on other hosts may take to save their state; by default the run's "
            "--stop-seconds. 0 cancels a job at once.",
        ),
    ] = None,
) -> None:
    """End a run and all of its jobs, including waiting ones. Does nothing if nothing runs.

    Ranks that can be stopped save their state first.
    """
    from hpctrain.common.run.directory import read_model
    from hpctrain.common.run.plan import Plan, Stop
    from hpctrain.control.schedulers.cancel import cancel_jobs, stop_launcher
    from hpctrain.control.schedulers.find_run import find_run
    from hpctrain.report.record import Record
    from hpctrain.report.status import RunStatus, read_status

    located = find_run(target)
    cancelled = False
    for line in cancel_jobs(located, save_seconds=save_seconds):
        answer(line)
        cancelled = True
    if not cancelled and not located.directory.summary.exists():
        plan = located.directory.plan
        stop = read_model(plan, Plan).stop if plan.exists() else Stop()
        start = Record.read(located.directory).start
        for line in stop_launcher(located.directory, start, stop.seconds + _GRACE_SECONDS, save_seconds=save_seconds):
            answer(line)
            cancelled = True
    run, _ = read_status(located)
    if not cancelled:
        answer("nothing to cancel: no process or job of the run is alive")
    for status in [run] if isinstance(run, RunStatus) else run.tasks:
        name = "the run" if status.task is None else f"task {status.task}"
        why = f": {status.message}" if status.state == "failed" else ""
        answer(f"{name} is {status.state}{why}{f'; resume with: {status.resume}' if status.resume else ''}")

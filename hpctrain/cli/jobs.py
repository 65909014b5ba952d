"""Shows, submits and follows jobs."""

from __future__ import annotations

import typer

from hpctrain.common.files.printable import shell_word
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.resuming import resume_command
from hpctrain.control.schedulers.outcome import last_words, may_go_on
from hpctrain.control.schedulers.scheduler import Order, scheduler
from hpctrain.report.output import answer, tell

# The exit status that shells give to a command that Ctrl-C ended.
_INTERRUPTED = 130


def order_job(order: Order, *, dry_run: bool = False, wait: bool = False) -> None:
    """Print what would be submitted, on stdout for other programs to read; or submit it, and print directory and jobs.

    Args:
        wait: follow the run to its end, and exit as it does.

    Raises:
        HpctrainError: the order cannot be met, or the scheduler refuses.
    """
    where = scheduler(order.cluster.profile.scheduled_by)
    if dry_run:
        shown = where.describe(order, tell)
        answer(shown.text, end="")
        if shown.notes:
            tell(shown.notes)
        return
    submitted = where.submit(order, tell)
    answer(submitted.directory)
    answer(" ".join(submitted.jobs))
    tell(submitted.advice)
    directory = RunDirectory(submitted.directory)
    if wait:
        raise typer.Exit(_wait(directory, order.request.tasks))


def _wait(directory: RunDirectory, tasks: tuple[int, ...]) -> int:
    from hpctrain.cli.run_output import print_metrics
    from hpctrain.control.schedulers import waiting
    from hpctrain.control.supervision.audience import Audience
    from hpctrain.control.supervision.follow import Follower
    from hpctrain.report.console import Console
    from hpctrain.report.page import read_summary

    runs = [RunDirectory(directory.path / f"task-{task}") for task in tasks] or [directory]
    try:
        with Console() as console:
            audience = Audience(show=console.show, output=console.output, errors=console.errors)
            follower = None if tasks else Follower(directory, audience)
            waiting.wait(directory, follower, tell)
    except KeyboardInterrupt:
        place = shell_word(directory.path)
        tell(f"the job continues. See its state: hpctrain status {place}")
        tell(f"  follow it: hpctrain logs -f {place}; end it: hpctrain cancel {place}")
        return _INTERRUPTED
    code = waiting.exit_code(runs)
    if not code and not tasks:
        print_metrics(read_model(directory.plan, Plan), read_summary(directory))
        tell(f"report: hpctrain report {shell_word(directory.path)}")
    if code:
        words = None if tasks else last_words(directory)
        tell(f"hpctrain: not finished; what the jobs printed is in {directory.logs}{f': {words}' if words else ''}")
        if any(may_go_on(waiting.status_left(run), last_words(run)) for run in runs):
            tell(f"  to resume: {resume_command(directory)}")
    return code

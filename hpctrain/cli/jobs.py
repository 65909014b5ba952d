"""Shows, submits and follows jobs of Slurm."""

from __future__ import annotations

from pathlib import Path

import typer

from hpctrain.common.files.printable import shell_word
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.resuming import resume_command
from hpctrain.control.schedulers.outcome import last_words, may_go_on
from hpctrain.control.schedulers.slurm.submission import PreparedJob, check
from hpctrain.control.schedulers.slurm.submission import submit as submit_job
from hpctrain.report.output import answer, tell, terminal

# The exit status that shells give to a command that Ctrl-C ended.
_INTERRUPTED = 130

_NOT_BY_ITSELF = (
    "# To look at: sbatch of this file alone ends without a log, because hpctrain submit makes the run directory\n"
    "# with plan and logs, and submits this script too."
)


def show_job(job: PreparedJob, path: Path) -> None:
    """Print what would be submitted for the run directory ``path``: on stdout the script alone.

    Raises:
        HpctrainError: the script cannot be made, or Slurm refuses it.
    """
    # Imported here, because it renders placements, which a submission does not need.
    from hpctrain.control.schedulers.preview import preview

    script = job.script(path)
    first, _, rest = script.partition("\n")
    answer(f"{first}\n{_NOT_BY_ITSELF}\n{rest}", end="")
    tell(preview(job))
    if message := check(script):
        tell(message)


def send_job(job: PreparedJob, path: Path, *, numbered: bool, wait: bool, repeated: bool = False) -> None:
    """Submit the job, see :func:`hpctrain.control.schedulers.slurm.submission.submit`; print its directory and numbers.

    Args:
        wait: follow the run to its end, and exit as it does.
        repeated: its tasks are repeated runs, of which a table is printed at the end.
    """
    directory, jobs = submit_job(job, path, numbered=numbered)
    answer(directory.path)
    answer(" ".join(jobs))
    several = "s" * (len(jobs) > 1)
    tell(f"submitted as job{several} {', '.join(jobs)}; see its state: hpctrain status {shell_word(directory.path)}")
    if wait:
        from hpctrain.control.supervision.repeats import array_series
        from hpctrain.report.repeats import read_repeats, table

        code = _wait(directory, job.request.tasks)
        if repeated and (series := array_series(directory.path)):
            terminal().print(table(read_repeats(series)))
            tell(f"report: hpctrain report {shell_word(directory.path)}")
        raise typer.Exit(code)


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

"""``hpctrain run``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.options import Arguments, HostsWithSlots, Oversubscribe, RecipeOrScript, given, with_groups
from hpctrain.cli.training_options import StartOptions, StopOptions, WorkOptions
from hpctrain.cli.work import read_work
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.plan import HostOptions, Script, Start, Stop
from hpctrain.common.run.request import TrainingRequest


@with_groups
def run(
    work: RecipeOrScript = None,
    arguments: Arguments = None,
    ranks: Annotated[
        int | None,
        typer.Option("-np", metavar="N", help="Number of ranks; by default one per host, or one per GPU of --node."),
    ] = None,
    oversubscribe: Oversubscribe = False,
    *,
    training: WorkOptions,
    hosts: HostsWithSlots,
    run_dir: Annotated[
        # No Path, to which ./last would be what `last` is.
        str | None,
        typer.Option(
            metavar="DIR",
            help="Where the run's files go; by default hpctrain-runs/NAME-TIME. With --resume, also `last`.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in --run-dir, or start it if there is none.")
    ] = False,
    submitted: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="What --resume starts if there is no run: a job's plan.json."),
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Let --resume continue with a changed recipe or script.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command that would start the ranks; run nothing.")
    ] = False,
    start: StartOptions,
    stop: StopOptions,
) -> None:
    """Train a recipe, or run a script, on ranks of this machine, of --hosts, or of the Slurm allocation.

    All hosts share its files. --resume continues an interrupted run as it was started. TERM, INT, USR1 and
    USR2 stop it with a checkpoint; a second TERM or INT ends it at once. A second one of the others does not, because
    Slurm may deliver them twice.
    """
    if accept_changes and not resume:
        raise HpctrainError(
            "HT-option-needs-another",
            "--accept-changes is for a run that is resumed",
            "--resume --run-dir DIR names it",
        )
    if submitted and (work or not resume):
        raise HpctrainError(
            "HT-options-exclude-each-other",
            "--plan says what --resume starts",
            "give --resume --run-dir DIR, and no recipe or script",
        )
    request = TrainingRequest(
        host_options=HostOptions(**hosts.given()),
        start=Start(**start.changes(), **given(oversubscribe=oversubscribe or None)),
        stop=Stop(**stop.changes()),
        work=_work(work, arguments or [], training, resume=resume),
        overrides=() if work else tuple(training.overrides or ()),
        mesh=None if work else training.mesh,
        tracking=training.trackers,
        accept_changes=accept_changes,
        ranks=ranks,
        backend=training.backend,
        framework=training.framework,
        run_dir=_directory(run_dir, resume=resume),
        submitted=submitted,
        dry_run=dry_run,
    )
    # Imported last: without them, a misspelt recipe is reported in two thirds of the time.
    from hpctrain.cli.run_output import Terminal
    from hpctrain.control.supervision.begin import begin_or_resume

    raise typer.Exit(begin_or_resume(request, Terminal(), resume=resume))


def _directory(name: str | None, *, resume: bool) -> Path | None:
    if resume and name == "last" and not os.path.lexists(name):
        from hpctrain.control.schedulers.run_jobs import last_run

        return last_run()
    return None if name is None else Path(name)


def _work(work: str | None, arguments: list[str], training: WorkOptions, *, resume: bool) -> Recipe | Script | None:
    if work is not None:
        return read_work(work, training, arguments)
    if not resume or training.small:
        raise HpctrainError(
            "HT-argument-missing",
            "which recipe or script?",
            "name it: hpctrain run digits; `hpctrain recipes list` lists them",
        )
    return None

"""``hpctrain run``."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from hpctrain.cluster.mpi import MpiInstallation
    from hpctrain.events import Event
    from hpctrain.launch.command import Command
    from hpctrain.plan import Plan, Script
    from hpctrain.recipes.schema import Recipe
    from hpctrain.rundir import RunDirectory


def run(
    work: Annotated[str, typer.Argument(metavar="RECIPE|SCRIPT.py", help="A recipe's name or file, or a script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="For the script.")] = None,
    ranks: Annotated[int, typer.Option("-np", metavar="N", help="How many ranks.")] = 1,
    backend: Annotated[str, typer.Option(help="What reduces gradients: auto, horovod or single.")] = "auto",
    framework: Annotated[str | None, typer.Option(help="torch or keras; for a recipe.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the recipe; repeatable.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the run's files go; by default runs/NAME-TIME.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and the environment; run nothing.")] = (
        False
    ),
) -> None:
    """Train a recipe, or run a script, on one or more ranks of this machine."""
    from hpctrain.launch.command import launch_command
    from hpctrain.planning.machine import this_machine
    from hpctrain.planning.planner import make_plan, oversubscription
    from hpctrain.rundir import RunDirectory

    machine = this_machine()
    plan = make_plan(
        _work(work, overrides or [], arguments or []), machine, ranks=ranks, backend=backend, framework=framework
    )
    if warning := oversubscription(plan, machine):
        typer.echo(f"hpctrain: warning: {warning}", err=True)
    directory = RunDirectory((run_dir or _default_directory(plan)).absolute())
    command = launch_command(
        plan,
        directory.path,
        python=Path(sys.executable),
        mpi=_mpi(plan),
        cores=machine.cores,
        root=os.geteuid() == 0,
    )
    if dry_run:
        typer.echo(command.shell())
        return
    directory.create()
    raise typer.Exit(_execute(command, plan, directory))


def _work(work: str, overrides: list[str], arguments: list[str]) -> Recipe | Script:
    if not work.endswith(".py"):
        from hpctrain.recipes.load import load_recipe

        if arguments:
            raise HpctrainError(f"arguments {shlex.join(arguments)} are for a script, and {work} is a recipe")
        return load_recipe(work, overrides)
    from hpctrain.plan import Script

    if overrides:
        raise HpctrainError(f"--set is for recipes, and {work} is a script", f"pass it arguments: {work} -- ARGUMENTS")
    path = Path(work).resolve()
    if not path.is_file():
        raise HpctrainError(f"there is no script {work}", f"looked for {path}")
    return Script(path=path, arguments=tuple(arguments))


def _default_directory(plan: Plan) -> Path:
    return Path("runs") / f"{Path(plan.title).stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def _mpi(plan: Plan) -> MpiInstallation | None:
    """The MPI whose launcher starts the ranks, after a check that Horovod is built for it."""
    if plan.backend == "single":
        return None
    from hpctrain.build.check import require
    from hpctrain.cluster.mpi import find_mpi

    mpi = find_mpi()
    require(plan.framework)
    return mpi


def _execute(command: Command, plan: Plan, directory: RunDirectory) -> int:
    """Run, show, and leave ``summary.json``; returns the exit code."""
    from hpctrain.launch.run import launch
    from hpctrain.report.console import Console
    from hpctrain.report.summary import summarise
    from hpctrain.report.tensorboard import TensorBoardWriter
    from hpctrain.rundir import write_json

    write_json(directory.plan, plan.model_dump(mode="json"))
    with Console() as console, TensorBoardWriter(directory) as tensorboard:

        def show(event: Event) -> None:
            console.show(event)
            tensorboard.show(event)

        failure = launch(command, directory, plan.ranks, show=show, line=console.line)
    if failure:
        # Before anything is written, which a full disk would refuse.
        typer.echo(f"hpctrain: {failure}", err=True)
    summary = summarise(directory, plan, "failed" if failure else "done")
    if failure:
        summary["failure"] = {"rank": failure.rank, "host": failure.host, "message": failure.message}
    write_json(directory.summary, summary)
    if not failure:
        for name, value in summary["metrics"].items():
            typer.echo(f"{name.replace('_', ' ')} {'not finite' if value is None else f'{value:.4f}'}")
    typer.echo(f"report: hpctrain report {shlex.quote(str(directory.path))}", err=True)
    return 1 if failure else 0

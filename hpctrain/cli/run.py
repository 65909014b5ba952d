"""``hpctrain run``."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.errors import HpctrainError
from hpctrain.events import Event, EventWriter
from hpctrain.launch.start import command_for, launch_plan
from hpctrain.plan import Plan, Script
from hpctrain.planning.machine import Machine, this_machine
from hpctrain.planning.planner import make_plan, oversubscription
from hpctrain.recipes.load import load_recipe
from hpctrain.recipes.schema import Recipe
from hpctrain.report.console import Console
from hpctrain.report.summary import summarise
from hpctrain.rundir import RunDirectory, write_json


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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command with its environment; run nothing.")
    ] = False,
) -> None:
    """Train a recipe, or run a script, on one or more ranks of this machine."""
    machine = this_machine()
    plan = make_plan(
        _work(work, overrides or [], arguments or []), machine, ranks=ranks, backend=backend, framework=framework
    )
    if warning := oversubscription(plan, machine):
        typer.echo(f"hpctrain: warning: {warning}", err=True)
    directory = RunDirectory(run_dir or _default_directory(plan))
    if dry_run:
        typer.echo(command_for(plan, directory, machine).shell())
    else:
        raise typer.Exit(_execute(plan, directory, machine))


def _work(work: str, overrides: list[str], arguments: list[str]) -> Recipe | Script:
    if not work.endswith(".py"):
        if arguments:
            raise HpctrainError(f"arguments are for a script, and {work} is a recipe: {shlex.join(arguments)}")
        return load_recipe(work, overrides)
    if overrides:
        raise HpctrainError(f"--set is for recipes, and {work} is a script", "its arguments go behind --")
    path = Path(work).resolve()
    if not path.is_file():
        raise HpctrainError(f"there is no script {work}", f"looked for {path}")
    return Script(path=path, arguments=tuple(arguments))


def _default_directory(plan: Plan) -> Path:
    return Path("runs") / f"{Path(plan.title).stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def _execute(plan: Plan, directory: RunDirectory, machine: Machine) -> int:
    """Run, show, and leave ``summary.json``; returns the exit code."""
    # Half a second that --help and --dry-run do not need.
    from hpctrain.report.tensorboard import TensorBoardWriter

    with Console() as console, TensorBoardWriter(directory) as tensorboard:

        def show(event: Event) -> None:
            console.show(event)
            tensorboard.show(event)

        failure = launch_plan(plan, directory, machine, show=show, line=console.line)
    if failure:
        # Before anything is written, which a full disk would refuse.
        typer.echo(f"hpctrain: {failure}", err=True)
        with EventWriter(directory.events) as events:
            events.emit("fault", rank=failure.rank, host=failure.host, message=failure.message)
            events.emit("end", status="failed")
    summary = summarise(directory, plan, "failed" if failure else "done")
    if failure:
        summary["failure"] = {"rank": failure.rank, "host": failure.host, "message": failure.message}
    write_json(directory.summary, summary)
    if not failure:
        for name, value in summary["metrics"].items():
            typer.echo(f"{name.replace('_', ' ')} {'not finite' if value is None else f'{value:.4f}'}")
    typer.echo(f"report: hpctrain report {shlex.quote(str(directory.path))}", err=True)
    return 1 if failure else 0

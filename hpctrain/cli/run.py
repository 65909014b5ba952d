"""``hpctrain run``."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.host_options import FabricFile, HostList, Interface, NodeFile, Routes
from hpctrain.cluster.mpi import MpiInstallation
from hpctrain.errors import HpctrainError
from hpctrain.events import Event, EventWriter
from hpctrain.launch.hosts import arrange
from hpctrain.launch.start import command_for, find_launcher, launch_plan
from hpctrain.plan import HostOptions, Plan, Script
from hpctrain.planning.machine import Machine, this_machine
from hpctrain.planning.planner import make_plan, oversubscription
from hpctrain.recipes.load import load_recipe
from hpctrain.recipes.schema import Recipe
from hpctrain.report.console import Console
from hpctrain.report.summary import summarise
from hpctrain.rundir import RunDirectory, new_directory, write_json


def run(
    work: Annotated[str, typer.Argument(metavar="RECIPE|SCRIPT.py", help="A recipe's name or file, or a script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="For the script.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option("-np", metavar="N", help="How many ranks; by default one a host, or one a GPU of --node."),
    ] = None,
    backend: Annotated[str, typer.Option(help="What reduces gradients: auto, horovod or single.")] = "auto",
    framework: Annotated[str | None, typer.Option(help="torch or keras; for a recipe.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the recipe; repeatable.")
    ] = None,
    hosts: HostList = None,
    fabric: FabricFile = None,
    routes: Routes = None,
    node: NodeFile = None,
    interface: Interface = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the run's files go; by default runs/NAME-TIME.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command with its environment; run nothing.")
    ] = False,
) -> None:
    """Train a recipe, or run a script, on ranks of this machine, of --hosts, or of the Slurm allocation.

    All hosts share its files.
    """
    chosen = _work(work, overrides or [], arguments or [])
    machine = this_machine()
    options = HostOptions(hosts=hosts, fabric=fabric, routes=routes, node=node, interface=interface)
    arranged, warnings = arrange(options, machine.host, ranks)
    plan = make_plan(chosen, machine, hosts=arranged, backend=backend, framework=framework)
    too_many = oversubscription(plan, machine)
    for warning in (*warnings, too_many) if too_many else warnings:
        typer.echo(f"hpctrain: warning: {warning}", err=True)
    mpi = find_launcher(plan)
    if dry_run:
        directory = RunDirectory(run_dir or _default_directory(plan))
        typer.echo(command_for(plan, directory, machine, mpi).shell())
    else:
        directory = RunDirectory(run_dir) if run_dir else new_directory(_default_directory(plan))
        raise typer.Exit(_execute(plan, directory, machine, mpi))


def _work(work: str, overrides: list[str], arguments: list[str]) -> Recipe | Script:
    if not work.endswith(".py"):
        if arguments:
            raise HpctrainError(f"arguments are for a script, and {work} is a recipe: {shlex.join(arguments)}")
        return load_recipe(work, overrides)
    if overrides:
        raise HpctrainError(f"--set is for recipes, and {work} is a script", "its arguments go behind --")
    path = Path(work).resolve()
    try:
        path.open("rb").close()
    except OSError as error:
        raise HpctrainError(f"cannot read the script {work}: {error.strerror}", f"looked for {path}") from error
    return Script(path=path, arguments=tuple(arguments))


def _default_directory(plan: Plan) -> Path:
    return Path("runs") / f"{Path(plan.title).stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def _execute(plan: Plan, directory: RunDirectory, machine: Machine, mpi: MpiInstallation | None) -> int:
    """Run, show, and leave ``summary.json``; returns the exit code."""
    # Half a second that --help and --dry-run do not need.
    from hpctrain.report.tensorboard import TensorBoardWriter

    with Console() as console, TensorBoardWriter(directory) as tensorboard:

        def show(event: Event) -> None:
            console.show(event)
            tensorboard.show(event)

        failure = launch_plan(plan, directory, machine, mpi, show=show, line=console.line)
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
    return failure.exit_code if failure else 0

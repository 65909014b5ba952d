"""``hpctrain run``."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hpctrain.cli.host_options import FabricFile, Interface, NodeFile, Routes
from hpctrain.cli.start_options import (
    ContainerRuntime,
    Environment,
    HostFile,
    Hosts,
    IdleRestarts,
    Image,
    Interpreter,
    LauncherArguments,
    LauncherName,
    Mounts,
    SshPort,
    StopSeconds,
    StopSignal,
    given,
    start_changes,
    stop_changes,
)
from hpctrain.errors import HpctrainError
from hpctrain.events import Event, EventWriter
from hpctrain.launch.attempts import Attempt, hold, next_attempt, resume_command
from hpctrain.launch.command import Launcher
from hpctrain.launch.failure import Failure
from hpctrain.launch.hosts import arrange
from hpctrain.launch.resume import require_same_work, resumed_plan
from hpctrain.launch.start import command_for, find_launcher, launch_attempt
from hpctrain.plan import HostOptions, Plan, Script, Start, Stop
from hpctrain.planning.machine import Machine, this_machine
from hpctrain.planning.planner import make_plan, oversubscription
from hpctrain.recipes.load import load_recipe
from hpctrain.recipes.schema import Recipe
from hpctrain.report.console import Console
from hpctrain.report.summary import summarise
from hpctrain.rundir import RunDirectory, new_directory, read_model, write_json


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The command line. ``changes`` are the fields of the plan's host_options, start and stop that were given."""

    work: Recipe | Script | None
    ranks: int | None
    backend: str | None
    framework: str | None
    run_dir: Path | None
    dry_run: bool
    changes: dict[str, dict[str, Any]]


def run(
    work: Annotated[
        str | None, typer.Argument(metavar="[RECIPE|SCRIPT.py]", help="A recipe's name or file, or a script.")
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="For the script.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option("-np", metavar="N", help="How many ranks; by default one a host, or one a GPU of --node."),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="What reduces gradients: auto (the default), horovod or single.")
    ] = None,
    framework: Annotated[str | None, typer.Option(help="torch or keras; for a recipe.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the recipe; repeatable.")
    ] = None,
    hosts: Hosts = None,
    hostfile: HostFile = None,
    fabric: FabricFile = None,
    routes: Routes = None,
    node: NodeFile = None,
    interface: Interface = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the run's files go; by default runs/NAME-TIME.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --run-dir, or begin it where there is none.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command with its environment; run nothing.")
    ] = False,
    launcher: LauncherName = None,
    python: Interpreter = None,
    container: Image = None,
    container_runtime: ContainerRuntime = None,
    mounts: Mounts = None,
    environment: Environment = None,
    ssh_port: SshPort = None,
    launcher_arguments: LauncherArguments = None,
    stop_signal: StopSignal = None,
    stop_seconds: StopSeconds = None,
    idle_restarts: IdleRestarts = None,
) -> None:
    """Train a recipe, or run a script, on ranks of this machine, of --hosts, or of the Slurm allocation.

    All hosts share its files. --resume goes on with a run that was interrupted, as it was begun.
    """
    start = start_changes(
        launcher=launcher,
        python=python,
        image=container,
        runtime=container_runtime,
        mounts=mounts or None,
        environment=environment or None,
        ssh_port=ssh_port,
        arguments=launcher_arguments,
    )
    options = given(hosts=hosts, hostfile=hostfile, fabric=fabric, routes=routes, node=node, interface=interface)
    stop = stop_changes(signal=stop_signal, seconds=stop_seconds, idle_restarts=idle_restarts)
    asked = _Asked(
        work=_work(work, overrides or [], arguments or [], resume=resume),
        ranks=ranks,
        backend=backend,
        framework=framework,
        run_dir=run_dir,
        dry_run=dry_run,
        changes={"host_options": options, "start": start, "stop": stop},
    )
    raise typer.Exit(_resume(asked) if resume else _begin(asked))


def _work(work: str | None, overrides: list[str], arguments: list[str], *, resume: bool) -> Recipe | Script | None:
    if work is None:
        if not resume or overrides:
            raise HpctrainError(
                "which recipe or script?", "name it: hpctrain run digits; `hpctrain recipes list` lists them"
            )
        return None
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


def _begin(asked: _Asked) -> int:
    """A run that is not there yet; returns the exit code."""
    assert asked.work is not None
    machine = this_machine()
    options = HostOptions(**asked.changes["host_options"])
    arranged, warnings = arrange(options, machine.host, asked.ranks)
    plan = make_plan(
        asked.work,
        machine,
        hosts=arranged,
        backend=asked.backend or "auto",
        framework=asked.framework,
        host_options=options,
        start=Start(**asked.changes["start"]),
        stop=Stop(**asked.changes["stop"]),
    )
    _warn(plan, machine, warnings)
    default = Path("runs") / f"{Path(plan.title).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    found = find_launcher(plan)
    if asked.dry_run:
        typer.echo(command_for(plan, RunDirectory(asked.run_dir or default), machine, found).shell())
        return 0
    directory = RunDirectory(asked.run_dir) if asked.run_dir else new_directory(default)
    directory.create(plan)
    with hold(directory):
        return _execute(plan, directory, Attempt(), machine, found)


def _resume(asked: _Asked) -> int:
    """A run that is there, or is begun with its first resume; returns the exit code."""
    if asked.run_dir is None:
        raise HpctrainError("--resume: which run?", "name its directory: --run-dir runs/…")
    directory = RunDirectory(asked.run_dir)
    if not directory.plan.exists():
        if asked.work is None:
            raise HpctrainError(f"{directory.path} holds no run", "name its directory, or what to begin there")
        return _begin(asked)
    if asked.dry_run:
        return _go_on(asked, directory)
    with hold(directory):
        return _go_on(asked, directory)


def _go_on(asked: _Asked, directory: RunDirectory) -> int:
    before = read_model(directory.plan, Plan)
    if asked.work:
        require_same_work(before, asked.work)
    attempt = next_attempt(directory, {**dict(before.stop), **asked.changes["stop"]}["idle_restarts"])
    if attempt is None:
        typer.echo(f"hpctrain: {directory.path} is done", err=True)
        return 0
    machine = this_machine()
    plan, warnings = resumed_plan(
        before,
        machine,
        ranks=asked.ranks,
        backend=asked.backend,
        framework=asked.framework,
        changes=asked.changes,
    )
    _warn(plan, machine, (*(f"passed over a damaged checkpoint: {fault}" for fault in attempt.damaged), *warnings))
    found = find_launcher(plan)
    if asked.dry_run:
        typer.echo(command_for(plan, directory, machine, found).shell())
        return 0
    directory.begin_attempt(plan)
    return _execute(plan, directory, attempt, machine, found)


def _warn(plan: Plan, machine: Machine, warnings: Iterable[str]) -> None:
    too_many = oversubscription(plan, machine)
    for warning in (*warnings, too_many) if too_many else warnings:
        typer.echo(f"hpctrain: warning: {warning}", err=True)


def _execute(
    plan: Plan, directory: RunDirectory, attempt: Attempt, machine: Machine, launcher: Launcher | None
) -> int:
    """Run, show, and leave ``summary.json``; returns the exit code."""
    # Half a second that --help and --dry-run do not need.
    from hpctrain.report.tensorboard import TensorBoardWriter

    with Console() as console, TensorBoardWriter(directory) as tensorboard:

        def show(event: Event) -> None:
            console.show(event)
            tensorboard.show(event)

        failure = launch_attempt(
            plan,
            directory,
            attempt,
            machine,
            launcher,
            show=show,
            line=console.line,
            notice=console.notice,
        )
    if failure:
        # Before anything is written, which a full disk would refuse.
        typer.echo(f"hpctrain: {failure}", err=True)
        if failure.status == "resumable":
            typer.echo(f"  to go on: {resume_command(directory)}", err=True)
    _conclude(plan, directory, failure)
    typer.echo(f"report: hpctrain report {shlex.quote(str(directory.path))}", err=True)
    return failure.exit_code if failure else 0


def _conclude(plan: Plan, directory: RunDirectory, failure: Failure | None) -> None:
    """Record how the run ended, and print what it reached."""
    cause = {"rank": failure.rank, "host": failure.host, "message": failure.message} if failure else {}
    with EventWriter(directory.events) as events:
        if failure and not failure.stopped:
            events.emit("fault", **cause)
        # Rank 0 says by itself that a recipe is done.
        if failure or plan.script:
            events.emit("end", status=failure.status if failure else "done")
    summary = summarise(directory, plan, failure.status if failure else "done")
    if failure:
        summary["failure"] = cause
    write_json(directory.summary, summary)
    if not failure:
        for name, value in summary["metrics"].items():
            typer.echo(f"{name.replace('_', ' ')} {'not finite' if value is None else f'{value:.4f}'}")

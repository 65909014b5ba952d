"""``hpctrain run``."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.checkpoints.layout import iterations
from hpctrain.cli import completion
from hpctrain.cli.dry_run import show_command
from hpctrain.cli.host_options import FabricFile, HostFile, HostList, Interface, NodeFile, Routes
from hpctrain.cli.start_options import (
    Backend,
    ContainerRuntime,
    Environment,
    IdleRestarts,
    Image,
    Interpreter,
    LauncherArguments,
    LauncherName,
    Mounts,
    Restarts,
    Smoke,
    SshPort,
    StopSeconds,
    StopSignal,
    given,
    start_changes,
    stop_changes,
)
from hpctrain.cli.work import default_directory, read_work
from hpctrain.errors import HpctrainError
from hpctrain.launch.attempts import Attempt, hold, job_id
from hpctrain.launch.command import Launcher
from hpctrain.launch.hosts import are_given, arrange
from hpctrain.planning.machine import Machine, as_if_installed, this_machine
from hpctrain.planning.planner import make_plan, oversubscription, require_processors
from hpctrain.recipes.schema import Recipe
from hpctrain.report.say import say
from hpctrain.run.directory import RunDirectory, new_directory, read_model, write_json
from hpctrain.run.plan import HostOptions, Plan, Script, Start, Stop
from hpctrain.run.resuming import resume_command
from hpctrain.run.stopping import RESUMABLE
from hpctrain.supervision.interrupts import Interrupted, Interrupts
from hpctrain.supervision.repeats import (
    MOST,
    Series,
    create_series,
    read_series,
    repeated,
    require_count,
    require_no_series,
)
from hpctrain.supervision.start import available_launcher, require_packages

if TYPE_CHECKING:
    from hpctrain.run.events import Event
    from hpctrain.supervision.failure import Failure


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The command line.

    Attributes:
        work: with what ``--set`` changes, where it is named.
        overrides: where it is not: of the recipe of the run that goes on.
        changes: the fields of the plan's host_options, start and stop that were given.
    """

    work: Recipe | Script | None
    overrides: tuple[str, ...]
    accept_changes: bool
    ranks: int | None
    backend: str | None
    framework: str | None
    run_dir: Path | None
    repeat: int | None
    dry_run: bool
    oversubscribe: bool
    changes: dict[str, dict[str, Any]]


def run(
    work: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE|SCRIPT.py]",
            help="A recipe's name or file, or a script.",
            autocompletion=completion.recipes,
        ),
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="For the script.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option("-np", metavar="N", help="How many ranks; by default one a host, or one a GPU of --node."),
    ] = None,
    backend: Backend = None,
    framework: Annotated[str | None, typer.Option(help="torch or keras; for a recipe.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the recipe; repeatable.")
    ] = None,
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="Let more ranks than this machine has cores share them.")
    ] = False,
    small: Smoke = False,
    hosts: HostList = None,
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
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Of the recipe or script, where --resume finds others.")
    ] = False,
    repeat: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=MOST, help="Run the recipe with N seeds from its own on; mean and deviation."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what a shell would have to execute; run nothing.")
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
    restarts: Restarts = None,
    idle_restarts: IdleRestarts = None,
) -> None:
    """Train a recipe, or run a script, on ranks of this machine, of --hosts, or of the Slurm allocation.

    All hosts share its files. --resume goes on with a run that was interrupted, as it was begun. TERM, INT, USR1, USR2
    and --stop-signal stop it with a checkpoint; a second TERM or INT ends it at once, and no other signal does, which
    Slurm may deliver twice.
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
    stop = stop_changes(signal=stop_signal, seconds=stop_seconds, restarts=restarts, idle_restarts=idle_restarts)
    if accept_changes and not resume:
        raise HpctrainError("--accept-changes is for a run that goes on", "--resume --run-dir DIR names it")
    asked = _Asked(
        work=_work(work, overrides or [], arguments or [], small=small, resume=resume),
        overrides=() if work else tuple(overrides or ()),
        accept_changes=accept_changes,
        ranks=ranks,
        backend=backend,
        framework=framework,
        run_dir=run_dir,
        repeat=repeat,
        dry_run=dry_run,
        oversubscribe=oversubscribe,
        changes={"host_options": options, "start": start, "stop": stop},
    )
    try:
        code = _resume(asked) if resume else _begin_all(asked)
    except Interrupted as stop:
        say(f"hpctrain: {stop}", sys.stderr)
        code = RESUMABLE if job_id() or (run_dir and _is_run(run_dir)) else 1
    raise typer.Exit(code)


def _work(
    work: str | None, overrides: list[str], arguments: list[str], *, small: bool, resume: bool
) -> Recipe | Script | None:
    if work is not None:
        return read_work(work, overrides, arguments, small=small)
    if not resume or small:
        raise HpctrainError(
            "which recipe or script?", "name it: hpctrain run digits; `hpctrain recipes list` lists them"
        )
    return None


def _is_run(path: Path) -> bool:
    return RunDirectory(path).plan.exists() or read_series(path) is not None


def _begin_all(asked: _Asked) -> int:
    return _begin(asked) if asked.repeat is None else _begin_series(asked, asked.repeat)


def _make_plan(asked: _Asked, machine: Machine) -> tuple[Plan, tuple[str, ...]]:
    """The plan, and warnings."""
    assert asked.work is not None
    options = HostOptions(**asked.changes["host_options"])
    arranged, warnings = arrange(options, machine.host, asked.ranks)
    start = Start(**asked.changes["start"])
    if asked.dry_run and start.container is None:
        machine, missing = as_if_installed(machine)
        warnings += missing
    plan = make_plan(
        asked.work,
        machine,
        hosts=arranged,
        backend=asked.backend or "auto",
        framework=asked.framework,
        host_options=options,
        start=start,
        stop=Stop(**asked.changes["stop"]),
    )
    _require_processors(asked, plan, machine)
    return plan, warnings


def _require_processors(asked: _Asked, plan: Plan, machine: Machine) -> None:
    if not asked.oversubscribe and not are_given(plan.host_options):
        require_processors(plan, machine)


def _begin(asked: _Asked) -> int:
    """A run that is not there yet; returns the exit code."""
    if asked.run_dir:
        require_no_series(asked.run_dir)
        _require_no_checkpoints(RunDirectory(asked.run_dir))
    machine = this_machine()
    with Interrupts(Stop(**asked.changes["stop"]).signal) as interrupts:
        with interrupts.raised():
            plan, warnings = _make_plan(asked, machine)
            _warn(plan, machine, warnings)
            found = available_launcher(plan, machine)
        default = default_directory(plan.title)
        if asked.dry_run:
            return show_command(plan, RunDirectory(asked.run_dir or default), None, machine, found)
        require_packages(plan)
        directory = RunDirectory(asked.run_dir) if asked.run_dir else new_directory(default)
        directory.create(plan)
        with hold(directory):
            return _execute(plan, directory, Attempt(), machine, found, interrupts)


def _require_no_checkpoints(directory: RunDirectory) -> None:
    """Refuse to begin where a run was whose plan is lost: its checkpoints would be taken for the new run's."""
    # Unlike pathlib's this passes any name, whose fault is told where the directory is made.
    there = os.path.isdir(directory.checkpoints)  # noqa: PTH112
    if there and not directory.plan.exists() and iterations(directory.checkpoints):
        raise HpctrainError(
            f"{directory.path} holds checkpoints, and no plan.json that says of which run",
            "restore that file, or choose another place with --run-dir",
        )


def _begin_series(asked: _Asked, count: int) -> int:
    """Runs that are not there yet; returns the exit code."""
    machine = this_machine()
    with Interrupts(Stop(**asked.changes["stop"]).signal) as interrupts, interrupts.raised():
        plan, warnings = _make_plan(asked, machine)
        plans = repeated(plan, count)
        if asked.dry_run:
            # Else each seed says them.
            _warn(plan, machine, warnings)
        found = available_launcher(plan, machine)
    path = asked.run_dir or default_directory(plan.title)
    if asked.dry_run:
        for seed, directory in Series(path=path, seeds=tuple(plans)).runs.items():
            show_command(plans[seed], directory, None, machine, found)
        return 0
    require_packages(plan)
    return _run_series(asked, create_series(path if asked.run_dir else new_directory(path).path, plans))


def _run_series(asked: _Asked, series: Series) -> int:
    """What is left of them, and the table; returns the exit code."""
    # It draws reports too.
    from rich.console import Console as RichConsole

    from hpctrain.report.repeats import read_repeats, table

    def run_one(number: int, directory: RunDirectory) -> int:
        return _resume_run(replace(asked, work=_with_seed(asked.work, number)), directory)

    code = series.run(run_one, lambda text: say(f"hpctrain: {text}", sys.stderr))
    if asked.dry_run:
        return code
    repeats = read_repeats(series)
    write_json(series.file, repeats.model_dump(mode="json"))
    RichConsole().print(table(repeats))
    say(f"report: hpctrain report {shlex.quote(str(series.path))}", sys.stderr)
    return code


def _with_seed(work: Recipe | Script | None, number: int) -> Recipe | Script | None:
    """The work of the ``number``-th seed."""
    return work.model_copy(update={"seed": work.seed + number}) if isinstance(work, Recipe) else work


def _resume(asked: _Asked) -> int:
    """What is there, or is begun with its first resume; returns the exit code."""
    if asked.run_dir is None:
        raise HpctrainError("--resume: which run?", "name its directory: --run-dir runs/…")
    directory = RunDirectory(asked.run_dir)
    if series := read_series(asked.run_dir):
        require_count(series, asked.repeat)
        return _run_series(asked, series)
    if not directory.plan.exists():
        if asked.work is None:
            raise HpctrainError(f"{directory.path} holds no run", "name its directory, or what to begin there")
        return _begin_all(asked)
    if asked.repeat is not None:
        raise HpctrainError(f"{directory.path} holds one run", "--repeat needs a directory of its own: --run-dir DIR")
    return _resume_run(asked, directory)


def _resume_run(asked: _Asked, directory: RunDirectory) -> int:
    """A run that is there; returns the exit code."""
    stop = read_model(directory.plan, Plan).stop.model_copy(update=asked.changes["stop"])
    with Interrupts(stop.signal) as interrupts, contextlib.ExitStack() as held:
        with interrupts.raised():
            warning = None if asked.dry_run else held.enter_context(hold(directory))
        return _go_on(asked, directory, interrupts, () if warning is None else (warning,))


def _go_on(asked: _Asked, directory: RunDirectory, interrupts: Interrupts, warnings: tuple[str, ...]) -> int:
    from hpctrain.launch.resume import resumption

    with interrupts.raised():
        further = resumption(
            directory,
            work=asked.work,
            overrides=asked.overrides,
            accept_changes=asked.accept_changes,
            ranks=asked.ranks,
            backend=asked.backend,
            framework=asked.framework,
            changes=asked.changes,
            look_only=asked.dry_run,
        )
        if further is None:
            return _is_done(directory)
        # A run that goes on as it was begun was agreed to then.
        if asked.ranks is not None:
            _require_processors(asked, further.plan, further.machine)
        _warn(further.plan, further.machine, (*warnings, *further.warnings))
        found = available_launcher(further.plan, further.machine)
    if asked.dry_run:
        return show_command(further.plan, directory, further.attempt, further.machine, found)
    require_packages(further.plan)
    further.begin(directory)
    return _execute(further.plan, directory, further.attempt, further.machine, found, interrupts)


def _is_done(directory: RunDirectory) -> int:
    # The launcher can have died between the last event and the summary.
    if not directory.summary.exists():
        from hpctrain.report.summary import summarise

        write_json(directory.summary, summarise(directory, read_model(directory.plan, Plan), "done"))
    say(f"hpctrain: {directory.path} is done", sys.stderr)
    return 0


def _warn(plan: Plan, machine: Machine, warnings: Iterable[str]) -> None:
    too_many = oversubscription(plan, machine)
    for warning in (*warnings, too_many) if too_many else warnings:
        say(f"hpctrain: warning: {warning}", sys.stderr)


def _execute(
    plan: Plan,
    directory: RunDirectory,
    attempt: Attempt,
    machine: Machine,
    found: Launcher | None,
    interrupts: Interrupts,
) -> int:
    """Run and show; returns the exit code."""
    # Half a second that --help and --dry-run do not need.
    from hpctrain.report.console import Console
    from hpctrain.report.results import reported_text, result_title
    from hpctrain.report.summary import summarise
    from hpctrain.report.tensorboard import TensorBoardWriter
    from hpctrain.supervision.execution import Audience, Execution

    with Console() as console, TensorBoardWriter(directory) as tensorboard:

        def show(event: Event) -> None:
            console.show(event)
            tensorboard.show(event)

        def failed(failure: Failure) -> None:
            console.close()
            say(f"hpctrain: {failure.told_after(shown=0)}", sys.stderr)
            if failure.status == "resumable":
                say(f"  to go on: {resume_command(directory)}", sys.stderr)

        audience = Audience(show=show, line=console.line, notice=console.notice, failed=failed)
        execution = Execution(
            directory=directory, machine=machine, interrupts=interrupts, audience=audience, summarise=summarise
        )
        failure, summary = execution.run(plan, attempt, found)
    if not failure:
        for name, value in summary["metrics"].items():
            say(f"{name.replace('_', ' ')} {'not finite' if value is None else f'{value:.4f}'}", sys.stdout)
        if plan.recipe:
            say(f"{result_title(plan.recipe)}, {reported_text(plan.recipe)}", sys.stderr)
    say(f"report: hpctrain report {shlex.quote(str(directory.path))}", sys.stderr)
    return failure.exit_code if failure else 0

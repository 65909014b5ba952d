"""From a plan to running ranks: finds the MPI and the interpreter, makes the run directory, launches."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain.events import Event
from hpctrain.horovod.check import require
from hpctrain.launch.attempts import Attempt
from hpctrain.launch.command import Command, Launcher, launch_command
from hpctrain.launch.failure import Failure
from hpctrain.launch.launcher_choice import (
    bindable_cores,
    choose_launcher,
    require_image,
    told_of_slurm,
)
from hpctrain.launch.run import launch
from hpctrain.plan import Plan
from hpctrain.planning.machine import Machine, this_machine
from hpctrain.rundir import RunDirectory


def find_launcher(plan: Plan) -> Launcher | None:
    """What starts the plan's ranks; None for the backend ``single``.

    Raises:
        HpctrainError: there is no launcher that works, Horovod is not built for it, or a container's image is missing.
    """
    require_image(plan)
    if plan.backend == "single":
        return None
    machine = this_machine()

    def command(plan: Plan, directory: RunDirectory, launcher: Launcher, work: Sequence[str]) -> Command:
        return command_for(plan, directory, machine, launcher, work)

    launcher = choose_launcher(plan, command)
    # What another interpreter has cannot be seen from here.
    if plan.start.container is None and plan.start.python is None:
        require(plan.framework)
    return launcher


def command_for(
    plan: Plan,
    directory: RunDirectory,
    machine: Machine,
    launcher: Launcher | None,
    work: Sequence[str] | None = None,
) -> Command:
    """The command that runs ``plan`` on this machine with this interpreter, or ``work`` on its ranks."""
    return launch_command(
        plan,
        directory.path.absolute(),
        python=Path(sys.executable),
        launcher=launcher,
        cores=bindable_cores(machine.cores),
        root=os.geteuid() == 0,
        slurm=told_of_slurm(),
        work=work,
    )


def launch_plan(
    plan: Plan,
    directory: RunDirectory,
    machine: Machine,
    launcher: Launcher | None,
    *,
    show: Callable[[Event], None] = lambda event: None,
    line: Callable[[str], None] = lambda text: None,
) -> Failure | None:
    """Make the run directory, and run the plan to its end.

    Args:
        plan: the run.
        directory: where; it holds no run yet.
        machine: this machine.
        launcher: what :func:`find_launcher` found.
        show: gets each event as it happens.
        line: gets each line that rank 0 prints.

    Returns:
        None if every rank is done, else the first cause that is known.

    Raises:
        HpctrainError: the directory holds a run or cannot be written.
    """
    directory.create(plan)
    return launch_attempt(plan, directory, Attempt(), machine, launcher, show=show, line=line)


def launch_attempt(
    plan: Plan,
    directory: RunDirectory,
    attempt: Attempt,
    machine: Machine,
    launcher: Launcher | None,
    *,
    show: Callable[[Event], None] = lambda event: None,
    line: Callable[[str], None] = lambda text: None,
    notice: Callable[[str], None] = lambda text: None,
) -> Failure | None:
    """Run the plan of a directory that holds it already, from where the attempt begins.

    Args:
        attempt: what :func:`hpctrain.launch.attempts.next_attempt` found.
        notice: gets what the user has to know of a stop.

    The rest is as of :func:`launch_plan`.
    """
    command = command_for(plan, directory, machine, launcher)
    command.write_files()
    return launch(
        command,
        directory,
        plan.ranks,
        start=attempt.start(plan, launcher.name if launcher else "none"),
        stop=plan.stop,
        stoppable=plan.recipe is not None,
        show=show,
        line=line,
        notice=notice,
    )

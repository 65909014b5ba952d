"""From a plan to running ranks: finds the MPI and the interpreter, makes the run directory, launches."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from hpctrain.cluster.mpi import MpiInstallation, find_mpi
from hpctrain.events import Event
from hpctrain.horovod.check import require
from hpctrain.launch.command import Command, launch_command
from hpctrain.launch.failure import Failure
from hpctrain.launch.run import launch
from hpctrain.plan import Plan
from hpctrain.planning.machine import Machine
from hpctrain.rundir import RunDirectory


def find_launcher(plan: Plan) -> MpiInstallation | None:
    """The MPI whose mpirun starts the plan's ranks; None for the backend ``single``.

    Raises:
        HpctrainError: there is no MPI, or Horovod is not built for it.
    """
    if plan.backend == "single":
        return None
    mpi = find_mpi()
    require(plan.framework)
    return mpi


def command_for(plan: Plan, directory: RunDirectory, machine: Machine, mpi: MpiInstallation | None) -> Command:
    """The command that runs ``plan`` on this machine with this interpreter."""
    return launch_command(
        plan,
        directory.path.absolute(),
        python=Path(sys.executable),
        mpi=mpi,
        cores=machine.cores,
        root=os.geteuid() == 0,
    )


def launch_plan(
    plan: Plan,
    directory: RunDirectory,
    machine: Machine,
    mpi: MpiInstallation | None,
    *,
    show: Callable[[Event], None] = lambda event: None,
    line: Callable[[str], None] = lambda text: None,
) -> Failure | None:
    """Make the run directory, and run the plan to its end.

    Args:
        plan: the run.
        directory: where; it holds no run yet.
        machine: this machine.
        mpi: what :func:`find_launcher` found.
        show: gets each event as it happens.
        line: gets each line that rank 0 prints.

    Returns:
        None if every rank is done, else the first cause that is known.

    Raises:
        HpctrainError: the directory holds a run or cannot be written.
    """
    directory.create(plan)
    return launch(command_for(plan, directory, machine, mpi), directory, plan.ranks, show=show, line=line)

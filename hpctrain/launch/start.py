"""From a plan to running ranks: finds the MPI and the interpreter, makes the run directory, launches."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from hpctrain.cluster.mpi import find_mpi
from hpctrain.events import Event
from hpctrain.horovod.check import require
from hpctrain.launch.command import Command, launch_command
from hpctrain.launch.failure import Failure
from hpctrain.launch.run import launch
from hpctrain.plan import Plan
from hpctrain.planning.machine import Machine
from hpctrain.rundir import RunDirectory, write_json


def command_for(plan: Plan, directory: RunDirectory, machine: Machine) -> Command:
    """The command that runs ``plan`` on this machine with this interpreter.

    Raises:
        HpctrainError: it needs several ranks, and there is no MPI, or Horovod is not built for it.
    """
    mpi = None
    if plan.backend != "single":
        mpi = find_mpi()
        require(plan.framework)
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
    *,
    show: Callable[[Event], None] = lambda event: None,
    line: Callable[[str], None] = lambda text: None,
) -> Failure | None:
    """Make the run directory, and run the plan to its end.

    Args:
        plan: the run.
        directory: where; it holds no run yet.
        machine: this machine.
        show: gets each event as it happens.
        line: gets each line that rank 0 prints.

    Returns:
        None if every rank is done, else the first cause that is known.

    Raises:
        HpctrainError: what :func:`command_for` raises, or the directory holds a run or cannot be written.
    """
    command = command_for(plan, directory, machine)
    directory.create()
    write_json(directory.plan, plan.model_dump(mode="json"))
    return launch(command, directory, plan.ranks, show=show, line=line)

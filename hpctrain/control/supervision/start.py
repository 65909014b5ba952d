"""Starts the ranks of a plan: finds MPI and interpreter, makes the run directory, launches."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

from hpctrain.common.cluster.machine import Machine, same_host
from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import require as require_extras
from hpctrain.common.recipes.requirements import has_folder, shard_folder
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.records import holding
from hpctrain.common.settings import HOST_TIMEOUT, TIMEOUT
from hpctrain.control.horovod.check import require
from hpctrain.control.launchers.command import Launcher
from hpctrain.control.launchers.launcher_choice import (
    command_for,
    first_launcher,
    require_choices,
    require_image,
    require_mitigation,
)
from hpctrain.control.supervision.audience import Audience, LiveRun, ReadyRun
from hpctrain.control.supervision.failure import Failure
from hpctrain.control.supervision.hosts_ready import ready_hosts
from hpctrain.control.supervision.interrupts import Interrupts
from hpctrain.control.supervision.running_job import run_ranks


def available_launcher(plan: Plan, machine: Machine) -> Launcher | None:
    """The launcher of the plan's ranks, or the first that could be; None for ``single``. Starts nothing.

    Raises:
        HpctrainError: there is no launcher, Horovod is chosen and not built for it, it cannot go on without a dead
            rank where the plan wants that, or a container's image, what they are to train on or a variable that is to
            be passed on is missing.
    """
    require_choices(plan)
    require_image(plan.start.container)
    _require_program(plan, machine)
    _require_passed(plan)
    _require_data(plan, machine)
    if not plan.needs_launcher:
        return None
    launcher = first_launcher(plan)
    require_mitigation(plan, launcher)
    # A wrong setting is refused before anything is started.
    HOST_TIMEOUT.read()
    TIMEOUT.read()
    # The packages of another interpreter cannot be seen from here.
    may_be_missing = plan.capabilities is not None and plan.capabilities.needs_build
    if may_be_missing and plan.start.container is None and plan.start.python is None:
        require(plan.framework)
    return launcher


def require_packages(plan: Plan) -> None:
    """Refuse to start ranks if a package is missing here, or in the ranks if they use this Python.

    Raises:
        HpctrainError: an extra of hpctrain is not installed.
    """
    # Trackers are fed from this machine.
    extras = ["train"]
    if plan.start.container is None and plan.start.python is None:
        if plan.recipe and plan.recipe.data.name == "imagenet":
            extras.append("imagenet")
        if plan.framework:
            extras.append(plan.framework)
    require_extras(*extras)


def _require_program(plan: Plan, machine: Machine) -> None:
    """Refuse to start a program in each rank that this machine, if it is one of the hosts, does not have."""
    container = plan.start.container
    if container and container.runtime == "pyxis":
        return
    program = "apptainer" if container else plan.start.python
    if program and any(same_host(host.host, machine.host) for host in plan.hosts) and shutil.which(program) is None:
        option = "--container needs it" if container else "name the ranks' interpreter: --python PROGRAM"
        raise HpctrainError("HT-program-not-found", "there is no program {program}", option, program=program)


def _require_passed(plan: Plan) -> None:
    for name in plan.start.passed:
        if name not in os.environ:
            raise HpctrainError(
                "HT-variable-not-set",
                "{name} is to be passed on to the ranks, and is not set here",
                f"export {name}=…",
                name=name,
            )


def _require_data(plan: Plan, machine: Machine) -> None:
    """Refuse a folder of shards that is not whole, where this machine is one of the hosts and no container hides it."""
    if plan.recipe and has_folder(plan.recipe) and _sees_files(plan, machine):
        # Imported here because it loads NumPy.
        from hpctrain.common.shards.folders import training_fingerprint

        training_fingerprint(shard_folder(plan.recipe), plan.recipe.data.name)


def _sees_files(plan: Plan, machine: Machine) -> bool:
    """Whether this machine sees what the ranks see."""
    return plan.start.container is None and any(same_host(host.host, machine.host) for host in plan.hosts)


def require_weights(plan: Plan, machine: Machine) -> None:
    """Refuse a new run whose weights to begin with are not there; one that is resumed does not need them.

    Raises:
        HpctrainError: they are not there, where this machine would see them.
    """
    weights = plan.recipe and plan.recipe.model.init_from
    if not weights or not _sees_files(plan, machine):
        return
    if not os.path.exists(os.path.expanduser(weights)):  # noqa: PTH110, PTH111 - pathlib's raise for over-long names
        raise HpctrainError(
            "HT-weights-not-there",
            "model.init_from: there is no {path}",
            "--set model.init_from=PATH names a run directory, a checkpoint or a .safetensors file",
            path=weights,
        )


def run_plan(ready: ReadyRun, directory: RunDirectory, audience: Audience = Audience()) -> Failure | None:
    """Make the run directory and run the plan to its end.

    Args:
        directory: where; it holds no run yet.

    Returns:
        None if every rank is done, else the first cause that is known.

    Raises:
        HpctrainError: the directory holds a run or cannot be written, or ranks cannot start on a host (see
            :func:`hpctrain.control.supervision.hosts_ready.ready_hosts`).
    """
    plan = ready_hosts(ready.plan, ready.launcher, directory.path, notice=audience.notice)
    directory.create(plan)
    with Interrupts() as interrupts, holding(directory):
        run = LiveRun(directory=directory, interrupts=interrupts, audience=audience)
        return run_attempt(replace(ready, plan=plan), run)


def run_attempt(ready: ReadyRun, run: LiveRun) -> Failure | None:
    """Run the plan that a directory already holds, from where the attempt begins."""
    plan, launcher, attempt = ready.plan, ready.launcher, ready.attempt
    command = command_for(plan, run.directory, ready.machine, launcher, attempt=attempt.number)
    command.write_files()
    start = attempt.start(plan, launcher.name if launcher else "none")
    return run_ranks(command, run, plan, start)

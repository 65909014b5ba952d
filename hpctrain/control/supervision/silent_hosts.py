"""Finds the hosts of a run that still answer, using the program that starts ranks there."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from hpctrain.common.cluster.machine import Machine, same_host
from hpctrain.common.cluster.programs import run_program
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.plan import Plan
from hpctrain.control.launchers.command import JOB_SETTINGS, Launcher, Torchrun
from hpctrain.control.launchers.launcher_choice import in_allocation

_SECONDS = 10.0
_AT_ONCE = 64
# One task beside the ranks' own, wherever it may run, that needs no MPI (https://slurm.schedmd.com/srun.html).
_SRUN = ("srun", "--overlap", "--overcommit", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mpi=none", "--quiet")
# Where mpirun reaches the hosts by another program than ssh, ssh cannot tell whether they answer.
_OTHER_AGENT = re.compile(r"(?i)agent|bootstrap|launcher")
_OTHER_AGENT_VARIABLE = re.compile(r"(PRTE|OMPI)_MCA_plm_\w+_agent|(I_MPI_)?HYDRA_(LAUNCHER|BOOTSTRAP)\w*")


def silent_hosts(
    plan: Plan,
    launcher: Launcher | None,
    machine: Machine,
    environment: Mapping[str, str] = os.environ,
    *,
    lost: Sequence[str] = (),
) -> tuple[str, ...]:
    """The plan's hosts that do not answer within ten seconds; empty if they cannot be asked.

    If no host answers at all, the question is taken to be at fault, unless some hosts are known to be lost.

    Args:
        launcher: what starts its ranks; None where this machine does.
        machine: this one, which is not asked.
        lost: hosts that the launcher lost.
    """
    question = _question(plan, environment)
    others = [host.host for host in plan.hosts if not same_host(host.host, machine.host)]
    # Each host's torchrun is started on that host, so this one has no way to ask.
    if launcher is None or isinstance(launcher, Torchrun):
        return ()
    if question is None or not others or shutil.which(question[0]) is None:
        return ()

    def answers(host: str) -> bool:
        try:
            asked = (f"--nodelist={host}",) if question[0] == "srun" else ("--", host)
            own = {name: value for name, value in environment.items() if name not in JOB_SETTINGS}
            return run_program(*question, *asked, "true", seconds=_SECONDS, environment=own).returncode == 0
        except HpctrainError:
            return False

    with ThreadPoolExecutor(min(_AT_ONCE, len(others))) as pool:
        silent = tuple(host for host, answered in zip(others, pool.map(answers, others), strict=True) if not answered)
    return silent if lost or len(silent) < len(others) else ()


def _question(plan: Plan, environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The program that asks a host, with its options; None where hosts are reached by an unknown program."""
    if in_allocation(environment):
        return _SRUN
    if other_agent(plan, environment):
        return None
    return ssh_command(plan, _SECONDS)


def ssh_command(plan: Plan, seconds: float) -> tuple[str, ...]:
    """The ssh command that asks a plan's hosts; it never prompts, and connects within ``seconds``."""
    port = ("-p", str(plan.start.ssh_port)) if plan.start.ssh_port else ()
    return ("ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={seconds:.0f}", *port)


def other_agent(plan: Plan, environment: Mapping[str, str]) -> bool:
    """Whether options or variables make mpirun reach the hosts by another program than ssh."""
    return any(map(_OTHER_AGENT.search, plan.start.arguments)) or any(map(_OTHER_AGENT_VARIABLE.fullmatch, environment))

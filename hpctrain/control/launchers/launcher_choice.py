"""Chooses the launcher of a plan's ranks: the one that the plan names, or the first that is installed here."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.common.cluster.launcher import MPI_LAUNCHERS, SRUN_NONE, TORCHRUN, in_pod, pod_index
from hpctrain.common.cluster.machine import Machine, same_host
from hpctrain.common.cluster.mpi import MpiInstallation, find_mpi
from hpctrain.common.cluster.programs import program_output, run_program
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import Container, Plan
from hpctrain.common.settings import HOST_TIMEOUT
from hpctrain.control.launchers.command import Command, Launcher, Srun, Torchrun
from hpctrain.control.launchers.command_line import LaunchSite, launch_command, own_threads, settings_of

_LIST_SECONDS = 20.0
_NEEDS_NO_MPI = f"--launcher {SRUN_NONE} needs no MPI, with --backend gloo or nccl"
_STOP_INSTEAD = "--set fault_tolerance.lost_rank=stop ends the run resumably instead"


def command_for(
    plan: Plan,
    directory: RunDirectory,
    machine: Machine,
    launcher: Launcher | None,
    work: Sequence[str] | None = None,
    attempt: int = 1,
) -> Command:
    """The command that runs ``plan`` on this machine with this interpreter, or ``work`` on its ranks."""
    here = all(same_host(host.host, machine.host) for host in plan.hosts)
    site = LaunchSite(
        python=Path(sys.executable),
        cores=bindable_cores(machine.cores),
        root=os.geteuid() == 0,
        slurm=slurm_settings(),
        # Respect a user's own OMPI_MCA_btl.
        tcp="OMPI_MCA_btl" in os.environ,
        host_timeout=HOST_TIMEOUT.read(),
        # Ranks of this machine inherit the settings.
        settings=() if here else settings_of(os.environ),
        threads=own_threads(os.environ),
    )
    return launch_command(plan, directory.path.absolute(), launcher, site, work=work, attempt=attempt)


def first_launcher(plan: Plan, environment: Mapping[str, str] = os.environ) -> Launcher:
    """The launcher that the plan names, else the first that is installed: mpirun, and in a Slurm job also srun.

    A fault-tolerant run has only one choice. Starts nothing.

    Raises:
        HpctrainError: the named launcher, or every one, is not installed, or it cannot start ranks on all hosts.
    """
    if plan.start.launcher != "auto":
        launcher = _named(plan.start.launcher, environment)
    elif plan.fault_tolerant or not in_allocation(environment):
        launcher = _named("mpirun", environment)
    else:
        launcher = _first_installed(environment)
    hosts = len(plan.hosts)
    if isinstance(launcher, Torchrun) and hosts > 1 and pod_index(environment) is None:
        raise _unusable(
            f"torchrun starts ranks only on its own host, and the run has {hosts} hosts",
            "choose --launcher mpirun; `hpctrain submit --cluster kubernetes` starts a torchrun in each pod",
        )
    if isinstance(launcher, Torchrun) and launcher.node >= hosts:
        raise _unusable(
            f"this is pod {launcher.node}, from 0, and the run has {hosts} host{'' if hosts == 1 else 's'}",
            "the Job's completions and parallelism have to equal the number of hosts",
        )
    return launcher


def _unusable(problem: str, hint: str) -> HpctrainError:
    return HpctrainError("HT-launcher-not-usable-here", "{problem}", hint, problem=problem)


def _first_installed(environment: Mapping[str, str]) -> Launcher:
    """The first launcher of MPI that is installed."""
    reasons: dict[str, str] = {}
    for name in MPI_LAUNCHERS:
        try:
            return _named(name, environment)
        except HpctrainError as error:
            reasons[name] = error.message
    raise HpctrainError(
        "HT-launcher-none-installed",
        "no launcher can start the ranks here:\n{tried}",
        f"load the module of an MPI, or: pip install 'hpctrain[mpi]'; {_NEEDS_NO_MPI}",
        tried="\n".join(f"{name}: {reason}" for name, reason in reasons.items()),
    )


def in_allocation(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process runs in a Slurm job."""
    return bool(environment.get("SLURM_JOB_ID"))


def slurm_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """The variables that an mpirun needs in the Slurm job of this process, in place of Slurm's own; None outside."""
    if not in_allocation(environment):
        return None
    # mpirun reaches the hosts by srun, which without overlap would wait for the step of this process to end.
    settings = {"SLURM_OVERLAP": "1"}
    if "SLURM_STEP_ID" in environment:
        # In a step the list of hosts describes the job, but the tasks per host describe the step.
        settings["SLURM_TASKS_PER_NODE"] = f"1(x{environment.get('SLURM_JOB_NUM_NODES', '1')})"
    return settings


def bindable_cores(cores: int, environment: Mapping[str, str] = os.environ) -> int:
    """The number of a host's ``cores`` to which ranks can be bound.

    0 in a pod, which has a share of the node's processors but no fixed ones; in a step, whose processors differ from
    those of the launchers that it starts; and on a Slurm node that shares its machine with other slurmd: the ranks of
    each node would be bound to the same cores.
    """
    node = environment.get("SLURMD_NODENAME")
    shared = node is not None and not same_host(node, socket.gethostname())
    return 0 if shared or in_pod(environment) or "SLURM_STEP_ID" in environment else cores


def require_image(container: Container | None) -> None:
    """Refuse a container image whose file does not exist."""
    if container is None:
        return
    # Pyxis reads everything else as a name in a registry, and Apptainer as a file.
    pyxis_file = container.image.startswith(("/", "./"))
    is_file = pyxis_file if container.runtime == "pyxis" else "://" not in container.image
    if is_file and not Path(container.image).exists():
        raise HpctrainError(
            "HT-container-image-missing",
            "there is no container image {image}",
            f"looked for {Path(container.image).absolute()}; an address is like docker://python:3.12",
            image=container.image,
        )


def require_choices(plan: Plan) -> None:
    """Refuse a chosen launcher that cannot continue without a dead rank, as the planner does with backends."""
    if plan.fault_tolerant and plan.start.launcher not in ("auto", "mpirun"):
        raise HpctrainError(
            "HT-shrink-not-possible",
            "fault_tolerance.lost_rank: shrink: {launcher} ends the step of a rank that died",
            f"choose --launcher mpirun, of Open MPI 5; {_STOP_INSTEAD}",
            launcher=plan.start.launcher,
        )


def require_mitigation(plan: Plan, launcher: Launcher) -> None:
    """Refuse a launcher that would end the remaining ranks: any but the mpirun of an Open MPI 5 with ULFM.

    Source: https://docs.open-mpi.org/en/v5.0.x/features/ulfm.html.
    """
    if not plan.fault_tolerant:
        return
    open_mpi = launcher if isinstance(launcher, MpiInstallation) and launcher.flavour == "open-mpi-5" else None
    described = program_output(str(open_mpi.mpirun.with_name("ompi_info")), "--parsable") if open_mpi else ""
    if open_mpi is None or "options:ft_mpi_support:no" in described:
        raise HpctrainError(
            "HT-shrink-not-possible",
            "fault_tolerance.lost_rank: shrink needs the mpirun of an Open MPI 5 with failure mitigation, and "
            "{launcher} starts the ranks{without}",
            f"load Open MPI 5 or later, or: pip install 'hpctrain[mpi]'; {_STOP_INSTEAD}",
            launcher=launcher.name,
            without=", which was built without (--with-ft=no)" if open_mpi else "",
        )


def _named(name: str, environment: Mapping[str, str]) -> Launcher:
    """The launcher of that name, if it is installed."""
    if name == "mpirun":
        return find_mpi()
    if name == TORCHRUN:
        return Torchrun(node=pod_index(environment) or 0)
    srun = Srun(mpi=name.removeprefix("srun-"))
    if not in_allocation(environment):
        raise _unusable(
            f"{srun.name} starts ranks inside a Slurm job, and this process is not in one",
            "start it in one: hpctrain submit, or salloc",
        )
    if name != SRUN_NONE and srun.mpi not in (plugins := _plugins()):
        named = ", ".join(plugins) or "none"
        problem = f"this Slurm has no plugin {srun.mpi}; `srun --mpi=list` names {named}"
        raise _unusable(problem, f"choose --launcher mpirun; {_NEEDS_NO_MPI}")
    return srun


def _plugins() -> list[str]:
    """The plugins that ``srun --mpi=list`` names: a line each, and those of one version of PMIx after a colon."""
    answer = run_program("srun", "--mpi=list", seconds=_LIST_SECONDS)
    lines = (line.removeprefix("srun:").strip() for line in (answer.stdout + answer.stderr).splitlines())
    names = (name for line in lines for name in line.rpartition("available:")[2].split(","))
    return [name.strip() for name in names if name and " " not in name.strip()]

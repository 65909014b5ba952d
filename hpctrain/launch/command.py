"""A plan to the command that starts its ranks. Pure: the MPI and the interpreter come in as arguments."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.cluster.launcher import SIZE_VARIABLES
from hpctrain.cluster.mpi import MpiInstallation
from hpctrain.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to execute: a program behind its launcher, and what to change in the environment."""

    program: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """The whole command line."""
        return self.launcher + self.program

    def environment_from(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of the process to start."""
        kept = {name: value for name, value in inherited.items() if name not in self.without}
        return {**kept, **self.environment}

    def shell(self) -> str:
        """The same as text that a POSIX shell executes, one setting a line."""
        settings = [f"-u {name}" for name in self.without]
        settings += [shlex.quote(f"{name}={value}") for name, value in self.environment.items()]
        lines = ["env", *settings] if settings else []
        for word in self.launcher:
            # An option begins a line, and its values stay on it.
            if not lines or word.startswith("-"):
                lines.append(shlex.quote(word))
            else:
                lines[-1] += f" {shlex.quote(word)}"
        return " \\\n  ".join([*lines, shlex.join(self.program)])


def rank_environment(plan: Plan) -> dict[str, str]:
    """The variables that every rank gets."""
    threads = str(plan.threads_per_rank)
    return {
        "HPCTRAIN_BACKEND": plan.backend,
        "MKL_NUM_THREADS": threads,
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_NUM_INTEROP_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": threads,
        **plan.environment,
    }


def launch_command(
    plan: Plan, run_directory: Path, *, python: Path, mpi: MpiInstallation | None, cores: int, root: bool
) -> Command:
    """The command that runs a plan.

    Args:
        plan: the run.
        run_directory: absolute path of the directory that holds its plan.
        python: the interpreter of the ranks.
        mpi: whose mpirun starts them; None, and no mpirun, for the backend ``single``.
        cores: physical cores of each host; ranks are bound to cores where there are enough, unless the plan has places
            for them, which they take by themselves.
        root: whether the superuser starts the run, which Open MPI wants to be told.
    """
    # -P: the current directory is not searched, so that no file of the user's hides a module.
    program = (str(python), "-P", "-m", "hpctrain.train", str(run_directory))
    environment = rank_environment(plan)
    if mpi is None:
        return Command(program=program, environment=environment, without=SIZE_VARIABLES)
    placed = any(host.places for host in plan.hosts)
    bound = not placed and plan.threads_per_rank * max(host.slots for host in plan.hosts) <= cores
    options = _OPTIONS[mpi.flavour](plan, environment, bound=bound)
    if root and mpi.flavour in ("open-mpi-4", "open-mpi-5"):
        options = ["--allow-run-as-root", *options]
    return Command(program=program, launcher=(str(mpi.mpirun), *options))


def _open_mpi(plan: Plan, environment: Mapping[str, str], *, bound: bool) -> list[str]:
    options = ["-np", str(plan.ranks), "--host", _host_slots(plan)]
    if bound:
        options += ["--map-by", f"slot:PE={plan.threads_per_rank}", "--bind-to", "core"]
    else:
        options += ["--bind-to", "none"]
        if len(plan.hosts) > 1 or plan.hosts[0].places:
            # By default ranks may go round the hosts; a plan fills one after the other.
            options += ["--map-by", "slot"]
    # Without an InfiniBand adapter the UCX one-sided component prints an error line a rank.
    options += ["--mca", "osc", "^ucx"]
    for name, value in environment.items():
        options += ["-x", f"{name}={value}"]
    return options


def _mpich(plan: Plan, environment: Mapping[str, str], *, bound: bool) -> list[str]:
    options = ["-n", str(plan.ranks), "-hosts", _host_slots(plan)]
    options += ["-bind-to", f"core:{plan.threads_per_rank}" if bound else "none"]
    return options + _genv(environment)


def _intel(plan: Plan, environment: Mapping[str, str], *, bound: bool) -> list[str]:
    options = ["-n", str(plan.ranks), "-hosts", ",".join(host.host for host in plan.hosts)]
    options += ["-ppn", str(max(host.slots for host in plan.hosts))]
    # A domain a rank, each the same share of the cores.
    pinning = {"I_MPI_PIN_DOMAIN": "auto:compact"} if bound else {"I_MPI_PIN": "off"}
    return options + _genv({**pinning, **environment})


def _genv(environment: Mapping[str, str]) -> list[str]:
    return [word for name, value in environment.items() for word in ("-genv", name, value)]


def _host_slots(plan: Plan) -> str:
    return ",".join(f"{host.host}:{host.slots}" for host in plan.hosts)


_OPTIONS = {
    "open-mpi-4": _open_mpi,
    "open-mpi-5": _open_mpi,
    "mpich-hydra": _mpich,
    "intel-mpi": _intel,
}

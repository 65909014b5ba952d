"""The software of a host: Horovod and what it is built for, the launcher and the MPI, and versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpctrain.common.cluster.checks import Check
from hpctrain.common.cluster.host_list import fold_hosts
from hpctrain.common.cluster.mpi import BUILD_HINT
from hpctrain.control.horovod.check import AN_MPI

MPI_SOURCE = "https://docs.open-mpi.org/en/v5.0.x/launching-apps/slurm.html"
_VERSIONS_SOURCE = "https://docs.open-mpi.org/en/v5.0.x/version-numbering.html"


@dataclass(frozen=True, kw_only=True)
class World:
    """The MPI world as one process sees it that a launcher started.

    Attributes:
        size: the size of ``MPI_COMM_WORLD`` that it sees.
        mpi: name and version of the library.
        launcher: the name of what started it, and the size that it claims; None where no variable says so.
    """

    host: str
    size: int
    mpi: str
    launcher: str | None = None
    claimed: int | None = None


def horovod(checks: Sequence[Check], gpus: int, *, asked: bool = False) -> list[Check]:
    """The checks of ``hpctrain horovod check`` under names of their own; GPUs want NCCL.

    Unless runs are to use Horovod, it is no failure that it was never built, nor, without a GPU, what a built one
    lacks.

    Args:
        asked: whether runs are to use it.
    """
    named = []
    absent = any(check.name == "horovod" and check.status == "failed" for check in checks)
    needed_by = "Keras on several GPUs and --backend horovod need" if gpus else "--backend horovod needs"
    for check in checks:
        name = "Horovod" if check.name == "horovod" else f"Horovod {check.name}"
        if check.name == "nccl" and gpus and check.status == "not applicable":
            found = f"{gpus} GPUs, but {check.found}"
            named.append(replace(check, name=name, status="failed", found=found, wanted="NCCL for the GPUs"))
        elif check.status == "failed" and check.wanted != AN_MPI and not asked and (absent or not gpus):
            found = f"{check.found}; only {needed_by} it"
            named.append(replace(check, name=name, status="not applicable", found=found))
        else:
            named.append(replace(check, name=name))
    return named


def launcher_and_mpi(seen: Sequence[World], ranks: int, failed: Mapping[str, str]) -> Check:
    """Each process has to be one rank of all: with a launcher that MPI does not know, each is a world of one rank.

    Args:
        seen: of each process that wrote it, at least one.
        failed: launchers that were tried before this one, and why they do not work.
    """
    sizes = sorted({world.size for world in seen})
    wrong = [world for world in seen if world.size != ranks or world.claimed not in (None, ranks)]
    first = wrong[0] if wrong else seen[0]
    claim = f"{first.launcher} says {first.claimed}" if first.launcher else "no launcher has set its variables"
    found = f"MPI ({first.mpi}) sees {' or '.join(map(str, sizes))} rank{'' if sizes == [1] else 's'}; {claim}"
    found += "".join(f"; {name} does not work here: {' '.join(why.split())}" for name, why in failed.items())
    return Check(
        name="launcher and MPI",
        status="failed" if wrong else "ok",
        found=found,
        wanted=f"{ranks} rank{'' if ranks == 1 else 's'}, according to both",
        remedy=f"put the mpirun of that MPI first on the PATH, or start with srun --mpi=pmix; then {BUILD_HINT}"
        if wrong
        else "",
        source=MPI_SOURCE,
        where=tuple(dict.fromkeys(world.host for world in wrong)),
    )


def same_versions(versions: Mapping[str, Mapping[str, str]]) -> list[Check]:
    """One check of all packages with the same version on all hosts, and one for each that differs.

    Args:
        versions: of each host, the version of each package.
    """
    packages = list(dict.fromkeys(package for found in versions.values() for package in found))
    checks, alike = [], []
    for package in packages:
        hosts: dict[str, list[str]] = {}
        for host, found in versions.items():
            hosts.setdefault(found.get(package, "none"), []).append(host)
        if len(hosts) == 1:
            alike.append(f"{package} {next(iter(hosts))}")
            continue
        checks.append(
            Check(
                name=f"version of {package}",
                status="failed",
                found="; ".join(f"{version} on {fold_hosts(names)}" for version, names in hosts.items()),
                wanted="one version on all hosts",
                remedy="start from one environment on a file system that all hosts share, or from a container",
                source=_VERSIONS_SOURCE,
                where=tuple(versions),
            )
        )
    if alike:
        checks.append(Check(name="versions", status="ok", found=", ".join(alike), source=_VERSIONS_SOURCE))
    return checks

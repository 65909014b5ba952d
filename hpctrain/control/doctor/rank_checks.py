"""The checks that need all ranks together: what they are to each other, their versions, and an all-reduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpctrain.common.cluster.checks import Check, judge, skip
from hpctrain.common.cluster.host_list import fold_hosts
from hpctrain.common.cluster.mpi import BUILD_HINT

NUMBERS = 250_000
# At most this many different answers are listed.
_LISTED_ANSWERS = 3


@dataclass(frozen=True, kw_only=True)
class World:
    """The MPI world as one process sees it that a launcher started.

    Attributes:
        size: the size of ``MPI_COMM_WORLD`` that it sees.
        mpi: name and version of the library; empty for ranks without MPI.
        launcher: the name of what started it, and the size that it claims; None where no variable says so.
    """

    host: str
    size: int
    mpi: str = ""
    launcher: str | None = None
    claimed: int | None = None


@dataclass(frozen=True, kw_only=True)
class MeasuredAllreduce:
    """An all-reduce of 1 MB.

    Attributes:
        engine: the name to show of what reduced.
        seconds: the median; None where it did not end.
        right: whether every rank got the right numbers.
        error: why there was no result.
        possible: False where the engine is not installed, which is not a failure.
    """

    engine: str
    seconds: float | None = None
    right: bool = False
    error: str = ""
    possible: bool = True


def without_ranks() -> list[Check]:
    """The checks that need ranks, as not applicable because none ran."""
    why = "no ranks were started: -np 2, --hosts LIST, or inside a Slurm allocation"
    return [skip(name, why) for name in ("launcher and MPI", "1 MB all-reduce")]


def launcher_and_mpi(seen: Sequence[World], ranks: int) -> Check:
    """Each process has to be one rank of all: with a launcher that MPI does not know, each is a world of one rank.

    Args:
        seen: of each process that wrote it, at least one.
    """
    sizes = sorted({world.size for world in seen})
    wrong = [world for world in seen if world.size != ranks or world.claimed not in (None, ranks)]
    first = wrong[0] if wrong else seen[0]
    if not (wrong or first.mpi):
        return skip("launcher and MPI", f"{ranks} ranks of {first.launcher} met over Gloo, without MPI")
    claim = f"{first.launcher} says {first.claimed}" if first.launcher else "no launcher has set its variables"
    library = f"MPI ({first.mpi})" if first.mpi else "Gloo"
    found = f"{library} sees {' or '.join(map(str, sizes))} rank{'' if sizes == [1] else 's'}; {claim}"
    return judge(
        "launcher and MPI",
        found,
        failed=bool(wrong),
        wanted=f"{ranks} rank{'' if ranks == 1 else 's'}, according to both",
        remedy=f"put the mpirun of that MPI first on the PATH, or start with srun --mpi=pmix; then {BUILD_HINT}",
        where=tuple(dict.fromkeys(world.host for world in wrong)),
    )


def same_versions(versions: Mapping[str, Mapping[str, str]]) -> list[Check]:
    """One check of all packages with the same version on all hosts, and one for each that differs.

    Args:
        versions: of each host, the version of each package.
    """
    checks, alike = [], []
    for package in dict.fromkeys(package for installed in versions.values() for package in installed):
        hosts: dict[str, list[str]] = {}
        for host, installed in versions.items():
            hosts.setdefault(installed.get(package, "none"), []).append(host)
        if len(hosts) == 1:
            alike.append(f"{package} {next(iter(hosts))}")
            continue
        checks.append(
            judge(
                f"version of {package}",
                "; ".join(f"{version} on {fold_hosts(names)}" for version, names in hosts.items()),
                failed=True,
                wanted="one version on all hosts",
                remedy="start from one environment on a file system that all hosts share, or from a container",
                where=tuple(versions),
            )
        )
    return [*checks, *([Check(name="versions", status="ok", found=", ".join(alike))] if alike else [])]


def allreduce(reduction: MeasuredAllreduce, ranks: int) -> Check:
    """The numbers of a real all-reduce, and its time."""
    name = f"1 MB all-reduce, {reduction.engine}"
    if not reduction.possible:
        return skip(name, reduction.error)
    found = reduction.error or "wrong numbers"
    if reduction.seconds is not None:
        took = f"{reduction.seconds * 1e3:.3g} ms over {ranks} rank{'' if ranks == 1 else 's'}"
        found = took if reduction.right else f"wrong numbers after {took}"
    return judge(
        name,
        found,
        failed=reduction.seconds is None or not reduction.right,
        wanted="the right sum on every rank",
        remedy="see the checks above; then the network alone: hpctrain topology verify",
    )


def merge(by_host: Mapping[str, Sequence[Check]]) -> list[Check]:
    """The checks of several hosts, merged into one for all hosts with the same outcome.

    What was found may differ between them, as a measured speed does: it is listed with its hosts.
    """
    groups: dict[tuple[str, str, str, str], dict[str, Check]] = {}
    for host, checks in by_host.items():
        for check in checks:
            groups.setdefault((check.name, check.status, check.wanted, check.remedy), {})[host] = check
    return [
        replace(
            next(iter(checks.values())),
            found=_answers(checks),
            where=tuple(checks) if len(checks) < len(by_host) else (),
        )
        for checks in groups.values()
    ]


def _answers(checks: Mapping[str, Check]) -> str:
    hosts: dict[str, list[str]] = {}
    for host, check in checks.items():
        hosts.setdefault(check.found, []).append(host)
    if len(hosts) == 1:
        return next(iter(hosts))
    listed = [f"{fold_hosts(names)}: {text}" for text, names in list(hosts.items())[:_LISTED_ANSWERS]]
    rest = [name for names in list(hosts.values())[_LISTED_ANSWERS:] for name in names]
    return "; ".join([*listed, *([f"others on {fold_hosts(rest)}"] if rest else [])])

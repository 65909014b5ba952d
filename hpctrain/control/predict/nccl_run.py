"""One run of nccl-tests' ``all_reduce_perf``, from either file format: its ranks in groups, and its times."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctrain.common.errors import HpctrainError

AGAIN = "run all_reduce_perf again, and keep all that it prints"
WRONG_RESULTS = "results were wrong, so times mean nothing: repair the machine, then run all_reduce_perf again"
# Bandwidths are printed with two decimals, so the ratio of smaller ones is not exact enough.
TELLING_GB_S = 1.0
_ROUNDED, _RELATIVE = 0.0055, 2e-4

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank: the group whose collective it took part in, its host, and the GPU's name, empty where not told."""

    group: str
    host: str
    gpu: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run of ``all_reduce_perf``.

    Attributes:
        hosts: on which the ranks of one collective were.
        groups: collectives that each host took part in at the same time: more than one where ``NCCL_TESTS_SPLIT``
            made groups that share a host.
        gpu: the name of all GPUs; None where the file has none.
        kind: type and operation, such as ``float sum``.
        out_of_place, in_place: bytes and seconds of each row; empty where not measured.
    """

    ranks: int
    hosts: int
    groups: int
    gpu: str | None
    kind: str
    out_of_place: tuple[Point, ...]
    in_place: tuple[Point, ...]


@dataclass(kw_only=True)
class Run:
    """The part of a run that was read so far.

    Attributes:
        points: bytes and seconds, out of place and in place.
        rates: the place of each fast enough row, and its algorithm and bus bandwidths.
        other: the error that says that it is another collective; None for an all-reduce.
    """

    ranks: dict[int, Rank] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    points: tuple[list[Point], list[Point]] = field(default_factory=lambda: ([], []))
    rates: list[tuple[str, float, float]] = field(default_factory=list)
    other: HpctrainError | None = None

    def add(self, place: int, size: float, micros: float, rates: tuple[float, float], at: str) -> None:
        """Add one time of a row.

        Args:
            place: 0 for out of place, 1 for in place.
            size: bytes of a rank's buffer.
            rates: algorithm and bus bandwidth in GB/s.
            at: the place of the row, for error messages.

        Raises:
            HpctrainError: a time of 0.
        """
        if not micros:
            raise HpctrainError("HT-nccl-tests-damaged", "{where}: a time of 0", AGAIN, where=at)
        self.points[place].append((size, micros * 1e-6))
        if rates[0] >= TELLING_GB_S:
            self.rates.append((at, *rates))


def not_all_reduce(at: str, what: str) -> HpctrainError:
    """The error for a run of another collective."""
    return HpctrainError("HT-nccl-tests-not-usable", "{where}: {found}", "valid: all_reduce_perf", where=at, found=what)


def all_reduces(runs: list[Run], where: str) -> list[Measured]:
    """The all-reduces among the runs of a file.

    Raises:
        HpctrainError: there is none, or one lacks what a curve needs.
    """
    found = [_measured(run, where) for run in runs if run.other is None]
    if not found:
        raise next(run.other for run in runs if run.other)
    return found


def _measured(run: Run, where: str) -> Measured:
    if not any(run.points):
        raise HpctrainError("HT-nccl-tests-damaged", "{where}: no row with a time", AGAIN, where=where)
    if len(run.kinds) > 1:
        raise HpctrainError(
            "HT-nccl-tests-not-usable",
            "{where}: several types or operations: {kinds}",
            "measure one, such as -d float -o sum",
            where=where,
            kinds=", ".join(sorted(run.kinds)),
        )
    ranks, hosts, groups = _groups(run.ranks, where)
    _check_factor(run, ranks)
    gpus = {rank.gpu for rank in run.ranks.values() if rank.gpu}
    if len(gpus) > 1:
        raise HpctrainError(
            "HT-nccl-tests-not-usable",
            "{where}: different GPUs: {gpus}",
            "measure on GPUs of one kind",
            where=where,
            gpus=", ".join(sorted(gpus)),
        )
    return Measured(
        ranks=ranks,
        hosts=hosts,
        groups=groups,
        gpu=next(iter(gpus), None),
        kind=next(iter(run.kinds)),
        out_of_place=tuple(run.points[0]),
        in_place=tuple(run.points[1]),
    )


def _groups(ranks: Mapping[int, Rank], where: str) -> tuple[int, int, int]:
    """The ranks and hosts of one collective, and the collectives of each host; all groups have to be alike.

    nccl-tests print the times of one group, while all of them run at the same time (``NCCL_TESTS_SPLIT``,
    https://github.com/NVIDIA/nccl-tests).
    """
    if not ranks:
        raise HpctrainError(
            "HT-nccl-tests-damaged",
            "{where}: no line '#  Rank  0 …', so the number of ranks is unknown",
            AGAIN,
            where=where,
        )
    if missing := max(ranks) + 1 - len(ranks):
        raise HpctrainError(
            "HT-nccl-tests-damaged",
            "{where}: {missing} of {count} lines '#  Rank …' are missing",
            "give the whole output, with a line for each rank",
            where=where,
            missing=missing,
            count=max(ranks) + 1,
        )
    members: dict[str, Counter[str]] = defaultdict(Counter)
    for rank in ranks.values():
        members[rank.group][rank.host] += 1
    if len({each.total() for each in members.values()}) > 1:
        sizes = ", ".join(str(size) for size in sorted({each.total() for each in members.values()}))
        raise HpctrainError(
            "HT-nccl-tests-not-usable",
            "{where}: groups of {sizes} ranks",
            "measure groups of one size",
            where=where,
            sizes=sizes,
        )
    shapes = {tuple(sorted(each.values())) for each in members.values()}
    on_host = Counter(host for each in members.values() for host in each)
    if len(shapes) > 1 or len(set(on_host.values())) > 1:
        raise HpctrainError(
            "HT-nccl-tests-not-usable",
            "{where}: its groups lie differently on their hosts, and the times are those of one of them",
            "measure with NCCL_TESTS_SPLIT so that all have as many ranks on as many hosts, or without it",
            where=where,
        )
    (shape,) = shapes
    if len(set(shape)) > 1:
        raise HpctrainError(
            "HT-nccl-tests-not-usable",
            "{where}: hosts with {ranks} ranks",
            "measure with the same number on each host",
            where=where,
            ranks=" and ".join(map(str, sorted(set(shape)))),
        )
    if sum(shape) == 1:
        raise HpctrainError(
            "HT-nccl-tests-not-usable",
            "{where}: each rank by itself: nothing was reduced between ranks",
            "measure with several, such as -g 8; under mpirun nccl-tests must be built with MPI=1",
            where=where,
        )
    groups = next(iter(on_host.values()))
    if groups > 1 and len(shape) == 1:
        raise HpctrainError(
            "HT-nccl-tests-not-usable",
            "{where}: {groups} groups within one host ran at the same time and share what joins its GPUs",
            f'measure one group a host: without NCCL_TESTS_SPLIT, or with "DIV {groups * shape[0]}"',
            where=where,
            groups=groups,
        )
    return sum(shape), len(shape), groups


def _check_factor(run: Run, ranks: int) -> None:
    """An all-reduce has 2 (n - 1) / n times the bandwidth on its links (doc/PERFORMANCE.md of nccl-tests)."""
    wanted = 2 * (ranks - 1) / ranks
    for at, algorithm, bus in run.rates:
        factor = bus / algorithm
        # Both are rounded to two decimals.
        if abs(factor - wanted) > _ROUNDED * (1 + wanted) / algorithm + _RELATIVE * wanted:
            raise HpctrainError(
                "HT-nccl-tests-not-usable",
                "{where}: busbw is {factor:.3g} times algbw; of an all-reduce of {ranks} ranks it is "
                "{wanted:.3g} times",
                "give all_reduce_perf's output with a line for each rank",
                where=at,
                factor=factor,
                ranks=ranks,
                wanted=wanted,
            )

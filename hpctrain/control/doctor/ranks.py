"""The checks that need all ranks together: their clocks, a real all-reduce, and the order of their hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.common.cluster.checks import Check
from hpctrain.common.errors import HpctrainError
from hpctrain.control.doctor.software import MPI_SOURCE
from hpctrain.control.topology.fabric import Fabric
from hpctrain.control.topology.placement import report
from hpctrain.control.topology.summary import host_numbers

# Up to this skew, log lines of several hosts can be ordered, and make and NFS see which file is newer.
SKEW_SECONDS = 1.0
NUMBERS = 250_000

_START = "-np 2, --hosts LIST, or inside a Slurm allocation"
_CLOCK_SOURCE = "https://slurm.schedmd.com/quickstart_admin.html#quick_start"
_REDUCE_SOURCE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"

_ORDER_SOURCE = "https://slurm.schedmd.com/topology.html"


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
    sources = {
        "launcher and MPI": MPI_SOURCE,
        "1 MB all-reduce": _REDUCE_SOURCE,
        "clocks": _CLOCK_SOURCE,
        "host order": _ORDER_SOURCE,
    }
    return [
        Check(name=name, status="not applicable", found=f"no ranks were started: {_START}", source=source)
        for name, source in sources.items()
    ]


def clocks(offsets: Mapping[str, float]) -> Check:
    """Clocks of the hosts.

    Args:
        offsets: of each host, seconds that its clock is ahead of the first one's.
    """
    name = "clocks"
    if len(offsets) < 2:
        return Check(name=name, status="not applicable", found="all ranks are on one host", source=_CLOCK_SOURCE)
    skew = max(offsets.values()) - min(offsets.values())
    reference = sorted(offsets.values())[len(offsets) // 2]
    off = tuple(host for host, offset in offsets.items() if abs(offset - reference) > SKEW_SECONDS / 2)
    failed = skew > SKEW_SECONDS
    return Check(
        name=name,
        status="failed" if failed else "ok",
        found=f"{skew:.3g} s apart" if skew >= 1e-3 else f"{skew * 1e6:.0f} µs apart",
        wanted=f"at most {SKEW_SECONDS:g} s apart",
        remedy="synchronise the hosts' clocks with one server: chronyc tracking, timedatectl" if failed else "",
        source=_CLOCK_SOURCE,
        where=off if failed else (),
    )


def allreduce(reduction: MeasuredAllreduce, ranks: int) -> Check:
    """The numbers of a real all-reduce, and its time."""
    name = f"1 MB all-reduce, {reduction.engine}"
    if not reduction.possible:
        return Check(name=name, status="not applicable", found=reduction.error, source=_REDUCE_SOURCE)
    failed = reduction.seconds is None or not reduction.right
    found = reduction.error or "wrong numbers"
    if reduction.seconds is not None:
        time = f"{reduction.seconds * 1e3:.3g} ms over {ranks} rank{'' if ranks == 1 else 's'}"
        found = time if reduction.right else f"wrong numbers after {time}"
    return Check(
        name=name,
        status="failed" if failed else "ok",
        found=found,
        wanted="the right sum on every rank",
        remedy="see the checks above; then the network alone: hpctrain topology verify" if failed else "",
        source=_REDUCE_SOURCE,
    )


def host_order(hosts: Sequence[str], fabric: Fabric, known_from: str, *, flat: bool) -> Check:
    """How often a ring over the hosts goes from one group of leaf switches to another.

    Args:
        hosts: in the order of their ranks, each once.
        known_from: names the source of the fabric in the check.
        flat: no fabric is known, so that all orders are equal.
    """
    name = "host order"
    if len(hosts) < 2 or flat:
        found = "one host" if len(hosts) < 2 else "no fabric is known: --fabric FILE names one"
        return Check(name=name, status="not applicable", found=found, source=_ORDER_SOURCE)
    try:
        placed = report(fabric, host_numbers(fabric, hosts))
    except HpctrainError as error:
        return Check(name=name, status="not applicable", found=f"{known_from}: {error.message}", source=_ORDER_SOURCE)
    failed = placed.given.crossings > placed.bound and not placed.already_optimal
    order = ",".join(fabric.hosts[host] for host in placed.placed.order)
    return Check(
        name=name,
        status="failed" if failed else "ok",
        found=f"{placed.given.crossings} crossings between leaf switches ({known_from})",
        wanted=f"{placed.bound}, which no order can go below",
        remedy=f"start the ranks in this order: hpctrain run --hosts {order}" if failed else "",
        source=_ORDER_SOURCE,
    )

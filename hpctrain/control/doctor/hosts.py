"""The order of the hosts that the ranks really have, against the least crossings that any order can have."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.common.cluster.checks import Check
from hpctrain.common.errors import HpctrainError
from hpctrain.control.topology.fabric import Fabric
from hpctrain.control.topology.placement import report
from hpctrain.control.topology.summary import host_numbers

ORDER_SOURCE = "https://slurm.schedmd.com/topology.html"


def host_order(hosts: Sequence[str], fabric: Fabric, known_from: str, *, flat: bool) -> Check:
    """How often a ring over the hosts goes from one group of leaf switches to another.

    Args:
        hosts: in the order of their ranks, each once.
        known_from: what to say of where it is known from.
        flat: nothing is known, so that every order is as good.
    """
    name = "host order"
    if len(hosts) < 2 or flat:
        found = "one host" if len(hosts) < 2 else "no fabric is known: --fabric FILE names one"
        return Check(name=name, status="not applicable", found=found, source=ORDER_SOURCE)
    try:
        placed = report(fabric, host_numbers(fabric, hosts))
    except HpctrainError as error:
        return Check(name=name, status="not applicable", found=f"{known_from}: {error.message}", source=ORDER_SOURCE)
    failed = placed.given.crossings > placed.bound and not placed.already_optimal
    order = ",".join(fabric.hosts[host] for host in placed.placed.order)
    return Check(
        name=name,
        status="failed" if failed else "ok",
        found=f"{placed.given.crossings} crossings between leaf switches ({known_from})",
        wanted=f"{placed.bound}, which no order can go below",
        remedy=f"start the ranks in this order: hpctrain run --hosts {order}" if failed else "",
        source=ORDER_SOURCE,
    )

"""Makes a plan from a request, hosts and machine. Pure: all facts are arguments."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.common.cluster.machine import Machine
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.backend import choose_backend
from hpctrain.common.run.plan import Plan, Slots
from hpctrain.common.run.request import TrainingRequest, require_possible, unplaced_plan
from hpctrain.control.planning.micro_batch import sized
from hpctrain.control.planning.place_hosts import PlacedHosts


def make_plan(request: TrainingRequest, machine: Machine, hosts: PlacedHosts | None = None) -> Plan:
    """The plan of one run.

    Args:
        request: its ranks are one by default, and count only where no hosts are given.
        hosts: the placement of the ranks; by default all are on this machine, and share its cores evenly.

    For the errors, see :func:`unplaced_plan`, :func:`place_plan` and
    :func:`hpctrain.control.planning.micro_batch.sized`.
    """
    asked = 1 if request.ranks is None else request.ranks
    ranks = sum(host.slots for host in hosts.slots) if hosts else asked
    plan = unplaced_plan(replace(request, ranks=ranks), machine.frameworks)
    placed = _placed(plan, hosts or PlacedHosts(slots=(Slots(host=machine.host, slots=ranks),)), machine)
    return sized(placed, machine)


def place_plan(plan: Plan, hosts: PlacedHosts, machine: Machine) -> Plan:
    """The plan on these hosts, with all settings that follow from them.

    Args:
        plan: may have hosts of an earlier attempt, which are replaced.
        hosts: their slots add up to the plan's ranks.
        machine: one of the hosts; the others are assumed to be like it.

    Raises:
        HpctrainError: an error of :func:`unplaced_plan`, a backend that cannot join several ranks or start one on
            another host, or a script for GPUs where only the user knows which backend serves it.
    """
    # Checked again because a resumed run may have other ranks and another backend than at its beginning.
    require_possible(plan)
    return _placed(plan, hosts, machine)


def _placed(plan: Plan, hosts: PlacedHosts, machine: Machine) -> Plan:
    assert sum(host.slots for host in hosts.slots) == plan.ranks
    threads = _threads(hosts, machine)
    backend, reason = choose_backend(plan, hosts.slots, machine)
    placed: dict[str, object] = {
        "backend": backend,
        "backend_reason": reason,
        "hosts": hosts.slots,
        "host_order": hosts.order,
        "mesh_traffic": hosts.traffic,
        "environment": hosts.environment,
        "threads_per_rank": threads,
        "versions": machine.versions,
    }
    return Plan.model_validate({**dict(plan), **placed})


def _threads(hosts: PlacedHosts, machine: Machine) -> int:
    """The cores of the smallest slot, else a share of a host's cores, every host being like this one."""
    cores = [len(place.cores) for host in hosts.slots for place in host.places if place.cores]
    return min(cores) if cores else max(1, machine.cores // max(host.slots for host in hosts.slots))


def oversubscription(plan: Plan, machine: Machine) -> str | None:
    """A warning if a plan has more ranks than cores; None otherwise."""
    if len(plan.hosts) > 1 or plan.ranks <= machine.cores:
        return None
    return (
        f"{plan.ranks} ranks share {machine.cores} cores of {plan.hosts[0].host}: each step takes about "
        f"{plan.ranks / machine.cores:.3g} times as long as with a core per rank, and every reduction waits for "
        f"ranks that are not running; -np {machine.cores} is the fastest here. The numbers stay the same"
    )


def require_processors(plan: Plan, machine: Machine) -> None:
    """Refuse more ranks on this one machine than it has processors."""
    processors = max(machine.cores, machine.processors)
    if len(plan.hosts) > 1 or plan.ranks <= processors:
        return
    cores = "1 core" if machine.cores == 1 else f"{machine.cores} cores"
    threads = "" if processors == machine.cores else f" ({processors} hardware threads)"
    raise HpctrainError(
        "HT-ranks-too-many",
        "-np {ranks}: {host} has {cores}{threads} for {ranks} ranks",
        f"-np {machine.cores} is the fastest here; --oversubscribe lets ranks share cores, --hosts names more hosts",
        ranks=plan.ranks,
        host=plan.hosts[0].host,
        cores=cores,
        threads=threads,
    )

"""Makes a plan from a recipe or script, ranks and machine. Pure: all facts are arguments."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.common.cluster.backends import CAPABILITIES
from hpctrain.common.cluster.gpus import fitting_backend
from hpctrain.common.cluster.launcher import TORCHRUN
from hpctrain.common.cluster.machine import Machine, same_host
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.requirements import require_ranks
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.plan import HostOptions, Plan, Script, Slots, Start, Stop
from hpctrain.common.run.request import is_async, require_backend, require_possible, sends_largest, unplaced_plan
from hpctrain.control.planning.place_hosts import Hosts


def make_plan(
    work: Recipe | Script,
    machine: Machine,
    *,
    ranks: int = 1,
    backend: str = "auto",
    framework: str | None = None,
    hosts: Hosts | None = None,
    host_options: HostOptions = HostOptions(),
    start: Start = Start(),
    stop: Stop = Stop(),
) -> Plan:
    """The plan of one run.

    Args:
        ranks: the world size where no hosts are given; the ranks then share this machine's cores evenly.
        hosts: the placement of the ranks; by default all are on this machine.

    For the other arguments and the errors, see :func:`unplaced_plan` and :func:`place_plan`.
    """
    if hosts is None:
        require_ranks(ranks)
        hosts = Hosts(slots=(Slots(host=machine.host, slots=ranks),))
    unplaced = unplaced_plan(
        work,
        machine.frameworks,
        ranks=sum(host.slots for host in hosts.slots),
        backend=backend,
        framework=framework,
        host_options=host_options,
        start=start,
        stop=stop,
    )
    return _placed(unplaced, hosts, machine)


def place_plan(plan: Plan, hosts: Hosts, machine: Machine) -> Plan:
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


def _placed(plan: Plan, hosts: Hosts, machine: Machine) -> Plan:
    assert sum(host.slots for host in hosts.slots) == plan.ranks
    backend, reason = _backend(plan, hosts.slots, machine)
    placed: dict[str, object] = {
        "backend": backend,
        "backend_reason": reason,
        "hosts": hosts.slots,
        "host_order": hosts.order,
        "mesh_traffic": hosts.traffic,
        "environment": hosts.environment,
        "threads_per_rank": _threads(hosts, machine),
        "versions": machine.versions,
    }
    return Plan.model_validate({**dict(plan), **placed})


def _threads(hosts: Hosts, machine: Machine) -> int:
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
        f"-np {plan.ranks}: {plan.hosts[0].host} has {cores}{threads} for {plan.ranks} ranks",
        f"-np {machine.cores} is the fastest here; --oversubscribe lets ranks share cores, --hosts names more hosts",
    )


def _backend(plan: Plan, hosts: Sequence[Slots], machine: Machine) -> tuple[str, str]:
    """The backend and the reason for it, which is empty for a backend that the user chose."""
    if asked := CAPABILITIES.get(plan.asked_backend):
        if not asked.joins_ranks:
            _require_single(plan, [host.host for host in hosts], machine)
        return plan.asked_backend, ""
    if is_async(plan):
        return "mpi", "sync: async"
    # A single rank of an elastic run may be the rest of several, and others may join it.
    if plan.ranks == 1 and same_host(hosts[0].host, machine.host) and not plan.elastic:
        return "single", f"one rank on {machine.host}"
    if plan.start.launcher == TORCHRUN:
        return _without_mpi(plan, hosts, machine)
    if plan.fault_tolerant:
        return "mpi", "fault_tolerance: shrink"
    if sends_largest(plan):
        return "mpi", "communication.compression: top_k"
    return _fitting(plan, hosts, machine)


def _without_mpi(plan: Plan, hosts: Sequence[Slots], machine: Machine) -> tuple[str, str]:
    """The backend among those whose ranks torchrun may start, and the reason."""
    backend, reason = _fitting(plan, hosts, machine)
    if not CAPABILITIES[backend].meets_without_mpi:
        backend, reason = "gloo", "torchrun"
    require_backend(backend, plan)
    return backend, reason


def _require_single(plan: Plan, hosts: Sequence[str], machine: Machine) -> None:
    if plan.ranks > 1 and not CAPABILITIES[plan.asked_backend].replicates:
        raise HpctrainError(
            f"backend {plan.asked_backend!r} is for one process, not for -np {plan.ranks}", "choose --backend auto"
        )
    if elsewhere := [host for host in hosts if not same_host(host, machine.host)]:
        raise HpctrainError(
            f"backend {plan.asked_backend!r} starts its process on this machine, {machine.host}, not on {elsewhere[0]}",
            "choose --backend auto",
        )


def _fitting(plan: Plan, hosts: Sequence[Slots], machine: Machine) -> tuple[str, str]:
    """The backend that fits the host with the fewest GPUs for its ranks, and the reason."""
    framework = plan.framework
    only = plan.start.container is None and machine.frameworks == {"torch"}
    if framework is None and (only or not plan.mesh.replicates_only):
        framework = "torch"
    host, gpus = min(((host, _gpus(host, machine)) for host in hosts), key=lambda pair: pair[1] - pair[0].slots)
    backend, reason = fitting_backend(framework, gpus, host.slots, host.host if host.places else machine.host)
    if plan.start.container is not None:
        return backend, reason
    capable = CAPABILITIES[backend]
    if capable.needs_gpus and machine.versions.get("torch", "").endswith("+cpu"):
        return "mpi", f"PyTorch {machine.versions['torch']} is built for CPUs"
    if capable.needs_build and framework is None and backend not in machine.versions:
        raise HpctrainError(
            f"which backend is for {plan.title}? There is {reason.partition(', ')[2]}, and Horovod, which serves "
            "either framework, is not built",
            "--backend nccl for PyTorch; for Keras --backend horovod, after: hpctrain horovod build",
        )
    return backend, reason


def _gpus(host: Slots, machine: Machine) -> int:
    """A host's GPUs for ranks: those of its places, or as many as this machine has."""
    if host.places:
        return sum(place.gpu is not None for place in host.places)
    return machine.gpus

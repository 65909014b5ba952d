"""Makes a plan from a request, hosts and machine. Pure: all facts are arguments."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.common.cluster.machine import Machine
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.plan import Plan, Slots
from hpctrain.common.run.request import TrainingRequest, choose_backend, host_gpus, require_possible, unplaced_plan
from hpctrain.control.planning.place_hosts import PlacedHosts


def make_plan(request: TrainingRequest, machine: Machine, hosts: PlacedHosts | None = None) -> Plan:
    """The plan of one run.

    Args:
        request: its ranks are one by default, and count only where no hosts are given.
        hosts: the placement of the ranks; by default all are on this machine, and share its cores evenly.

    For the errors, see :func:`unplaced_plan`, :func:`place_plan` and :func:`sized`.
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


def sized(plan: Plan, machine: Machine) -> Plan:
    """A placed plan with a number in place of ``batch.micro_batch: auto``; one that has a number stays as it is.

    Args:
        machine: one of the hosts, whose memory the others are taken to have too.

    Raises:
        HpctrainError: the memory of the hosts is not known, or see
            :func:`hpctrain.control.predict.micro_batch.fitting`.
    """
    recipe = plan.recipe
    if recipe is None or recipe.batch.micro_batch != "auto":
        return plan
    # Imported here because it loads NumPy and the predictions, which other plans do not need.
    from hpctrain.control.predict.micro_batch import fitting

    room, place = min(_room(plan, host, machine) for host in plan.hosts)
    size = fitting(recipe, plan.ranks, room)
    share = recipe.batch.at_once(recipe.mesh.at(plan.ranks).data_ranks)
    reason = f"{size} of the {share} samples of a rank at once, by its predicted memory, for {place}"
    return plan.model_copy(update={"recipe": recipe.computing(size), "micro_batch_reason": reason})


def _room(plan: Plan, host: Slots, machine: Machine) -> tuple[float, str]:
    """The bytes that a rank of a host has, and of what."""
    # Over MPI, hpctrain keeps its models in the host's memory.
    on_cpu = plan.backend == "mpi" or machine.versions.get("torch", "").endswith("+cpu")
    gpus = 0 if on_cpu else host_gpus(host, machine)
    if gpus >= host.slots:
        return _known(machine.gpu_bytes, "GPUs"), f"a GPU of {_gigabytes(machine.gpu_bytes)}"
    if gpus and plan.start.share_gpus:
        each = -(-host.slots // gpus)
        room = _known(machine.gpu_bytes, "GPUs") / each
        return room, f"a GPU of {_gigabytes(machine.gpu_bytes)} that {each} ranks share"
    room = _known(machine.available_bytes, "hosts") / host.slots
    return room, f"{_gigabytes(machine.available_bytes)} of a host" + f" that {host.slots} ranks share" * (
        host.slots > 1
    )


def _known(nbytes: int | None, owners: str) -> int:
    if nbytes is None:
        raise HpctrainError(
            "HT-batch-auto-not-possible",
            "batch.micro_batch: auto needs the memory of the {owners}, which is not known here",
            "--set batch.micro_batch=N, or plan on one of the hosts",
            owners=owners,
        )
    return nbytes


def _gigabytes(nbytes: int | None) -> str:
    return f"{(nbytes or 0) / 1e9:.3g} GB"

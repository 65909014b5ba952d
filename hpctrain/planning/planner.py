"""Recipe or script, ranks and machine to a plan. Pure: the facts come in as arguments."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.errors import HpctrainError, nearest
from hpctrain.plan import BACKENDS, HostOptions, Plan, Script, Slots, Start, Stop
from hpctrain.planning.hosts import Hosts, require_ranks
from hpctrain.planning.machine import Machine, same_host
from hpctrain.recipes.schema import Framework, Recipe

FRAMEWORKS: tuple[Framework, ...] = ("torch", "keras")


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
        ranks: how many processes where no hosts are given; they share the machine's cores evenly.
        hosts: where the ranks are; by default all on this machine.

    The rest, and what is raised, is as of :func:`unplaced_plan` and :func:`place_plan`.
    """
    if hosts is None:
        require_ranks(ranks)
        hosts = Hosts(slots=(Slots(host=machine.host, slots=ranks),))
    unplaced = unplaced_plan(
        work,
        machine,
        ranks=sum(host.slots for host in hosts.slots),
        backend=backend,
        framework=framework,
        host_options=host_options,
        start=start,
        stop=stop,
    )
    return place_plan(unplaced, hosts, machine)


def unplaced_plan(
    work: Recipe | Script,
    machine: Machine,
    *,
    ranks: int,
    backend: str = "auto",
    framework: str | None = None,
    host_options: HostOptions = HostOptions(),
    start: Start = Start(),
    stop: Stop = Stop(),
) -> Plan:
    """The plan of a run whose hosts are not known yet.

    Args:
        work: what to run.
        machine: where.
        ranks: how many processes.
        backend: one of :data:`hpctrain.plan.BACKENDS`; ``auto`` is ``single`` for one rank on this machine, else
            ``horovod``, whose launcher reaches other hosts.
        framework: for a recipe; by default PyTorch where it is installed, else Keras.
        host_options: what the hosts are to be chosen by.
        start: how the ranks are started.
        stop: how they are stopped.

    Raises:
        HpctrainError: no rank at all, an unknown name, or a framework that is not installed.
    """
    require_ranks(ranks)
    _require_known(backend)
    # What a container has cannot be seen from outside.
    installed = frozenset(FRAMEWORKS) if start.container else machine.frameworks
    return Plan(
        recipe=work if isinstance(work, Recipe) else None,
        script=work if isinstance(work, Script) else None,
        framework=_framework(work, installed, framework),
        backend=backend,
        asked_backend=backend,
        ranks=ranks,
        host_options=host_options,
        start=start,
        stop=stop,
        threads_per_rank=1,
    )


def place_plan(plan: Plan, hosts: Hosts, machine: Machine) -> Plan:
    """The plan on these hosts, with all that follows from them.

    Args:
        plan: with or without hosts of before.
        hosts: with as many slots together as the plan has ranks.
        machine: one of the hosts; the others are like it.

    Raises:
        HpctrainError: an unknown backend, or one that cannot join several ranks or start one on another host.
    """
    assert sum(host.slots for host in hosts.slots) == plan.ranks
    placed: dict[str, object] = {
        "backend": _backend(plan.asked_backend, hosts.slots, machine),
        "hosts": hosts.slots,
        "host_order": hosts.order,
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
    """The warning for a plan with more ranks than cores, None for any other."""
    if len(plan.hosts) > 1 or plan.ranks <= machine.cores:
        return None
    return (
        f"{plan.ranks} ranks share {machine.cores} cores of {plan.hosts[0].host}: each step takes about "
        f"{plan.ranks / machine.cores:.3g} times as long as with a core a rank, and every reduction waits for ranks "
        f"that are not running; -np {machine.cores} is the fastest here. The numbers stay the same"
    )


def _require_known(backend: str) -> None:
    if backend not in BACKENDS:
        raise HpctrainError(f"unknown backend {backend!r}", nearest(backend, BACKENDS))


def _backend(backend: str, hosts: Sequence[Slots], machine: Machine) -> str:
    _require_known(backend)
    ranks = sum(host.slots for host in hosts)
    if backend == "single" and ranks > 1:
        raise HpctrainError(f"backend 'single' is for one process, not for -np {ranks}", "choose --backend horovod")
    here = same_host(hosts[0].host, machine.host)
    if backend == "single" and not here:
        raise HpctrainError(
            f"backend 'single' starts its process on this machine, {machine.host}, not on {hosts[0].host}",
            "choose --backend horovod",
        )
    if backend == "auto":
        return "single" if ranks == 1 and here else "horovod"
    return backend


def _framework(work: Recipe | Script, installed: frozenset[Framework], framework: str | None) -> Framework | None:
    if isinstance(work, Script):
        if framework:
            raise HpctrainError(
                f"--framework {framework} is for recipes: {work.path.name} chooses by itself", "leave --framework out"
            )
        return None
    chosen = framework or ("keras" if installed == {"keras"} else "torch")
    for known in FRAMEWORKS:
        if chosen == known:
            if known not in installed:
                raise HpctrainError(f"{known} is not installed in this Python", f"pip install 'hpctrain[{known}]'")
            return known
    raise HpctrainError(f"unknown framework {chosen!r}", nearest(chosen, FRAMEWORKS))

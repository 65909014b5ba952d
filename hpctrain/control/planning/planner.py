"""Makes a plan from a recipe or script, ranks and machine. Pure: all facts are arguments."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.common.cluster.backends import BACKENDS, CAPABILITIES, Capabilities
from hpctrain.common.cluster.gpus import fitting_backend
from hpctrain.common.cluster.launcher import TORCHRUN
from hpctrain.common.cluster.machine import Machine, same_host
from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.recipes.requirements import require_between, require_recipe
from hpctrain.common.recipes.schema import Framework, Recipe
from hpctrain.common.run.plan import HostOptions, Plan, Script, Slots, Start, Stop
from hpctrain.common.settings import PARAMETER_SERVERS
from hpctrain.control.planning.place_hosts import Hosts, require_ranks

FRAMEWORKS: tuple[Framework, ...] = ("torch", "keras")
# Strategies whose scope makes the variables once for all replicas or workers.
_IN_SCOPE = ("mirrored", "parameter_server")


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
    return place_plan(unplaced, hosts, machine)


def unplaced_plan(
    work: Recipe | Script,
    frameworks: frozenset[Framework],
    *,
    ranks: int,
    backend: str,
    framework: str | None,
    host_options: HostOptions,
    start: Start,
    stop: Stop,
) -> Plan:
    """The plan of a run whose hosts are not known yet.

    Args:
        frameworks: the installed ones. A container is assumed to have both, since it cannot be seen from outside.
        backend: one of :data:`hpctrain.common.cluster.backends.BACKENDS`; ``auto`` is ``single`` for one rank on this
            machine, else ``mpi`` where the recipe goes on without ranks that die, else that of
            :func:`hpctrain.common.cluster.gpus.fitting_backend`.
        framework: for a recipe; by default PyTorch where it is installed, else Keras.
        host_options: the options by which the hosts will be chosen.

    Raises:
        HpctrainError: fewer than one rank, a mesh that does not fit them, an unknown name, a framework that is not
            installed, a backend that does not serve the framework, the mesh or the recipe, or see
            :func:`hpctrain.common.recipes.requirements.require_recipe`.
    """
    require_ranks(ranks)
    plan = Plan(
        recipe=work.at(ranks) if isinstance(work, Recipe) else None,
        script=work if isinstance(work, Script) else None,
        framework=_framework(work, frozenset(FRAMEWORKS) if start.container else frameworks, framework),
        backend=backend,
        asked_backend=backend,
        ranks=ranks,
        host_options=host_options,
        start=start,
        stop=stop,
        threads_per_rank=1,
    )
    _require_possible(plan)
    return plan


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
    assert sum(host.slots for host in hosts.slots) == plan.ranks
    # Checked again because a resumed run may have other ranks and another backend than at its beginning.
    _require_possible(plan)
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


def _require_possible(plan: Plan) -> None:
    """Refuse what no hosts make possible: a mesh, a backend, or values of the recipe for the number of ranks."""
    _require_framework(plan)
    _require_backend(plan.asked_backend, plan)
    if plan.recipe:
        require_recipe(plan.recipe, plan.ranks)
    else:
        require_between(plan.fault_tolerance, plan.ranks)


def _require_framework(plan: Plan) -> None:
    # Reading the mesh raises where it does not fit the ranks.
    mesh = plan.mesh
    if plan.framework != "keras":
        return
    if plan.recipe and plan.recipe.model.name == "gpt":
        raise HpctrainError(
            f"the network of {plan.title} is available only in PyTorch, not in Keras", "--framework torch"
        )
    if not mesh.replicates_only:
        raise HpctrainError(
            f"the mesh {mesh} needs PyTorch, and {plan.title} is to run in Keras",
            f"choose --framework torch, or --mesh {_REPLICATED}",
        )


_REPLICATED = "dp_replicate=-1,dp_shard=1,pp=1,cp=1,tp=1"


def _require_backend(backend: str, plan: Plan) -> None:
    if backend not in BACKENDS:
        raise HpctrainError(f"unknown backend {backend!r}", nearest(backend, BACKENDS))
    capable = CAPABILITIES.get(backend)
    if capable is None:
        return
    if plan.framework is not None and plan.framework not in capable.frameworks:
        (own, other), backends = (("PyTorch", "Keras"), "mpi or horovod")
        if plan.framework == "torch":
            own, other, backends = "TensorFlow", "PyTorch", "mpi, nccl or gloo"
        raise HpctrainError(
            f"backend {backend!r} reduces {own}'s gradients, and {plan.title} is to run in {other}",
            f"choose --backend {backends}, or --framework {'torch' if own == 'PyTorch' else 'keras'}",
        )
    _require_strategy(plan, backend, capable)
    if plan.start.launcher == TORCHRUN and capable.joins_ranks and not capable.meets_without_mpi:
        raise HpctrainError(
            f"backend {backend!r} needs ranks that MPI started, and torchrun is to start them",
            "choose --backend gloo or nccl, or --launcher auto",
        )
    if not plan.mesh.replicates_only and not capable.has_meshes:
        raise HpctrainError(
            f"backend {backend!r} has no groups of ranks for the mesh {plan.mesh}", "choose --backend nccl, mpi or gloo"
        )
    if _sends_largest(plan) and not capable.sends_largest:
        raise HpctrainError(
            f"communication.compression: top_k needs --backend mpi; {backend!r} sends all gradients",
            "choose --backend mpi; or --set communication.compression=bf16",
        )
    if _is_async(plan) and not capable.serves_parameters:
        raise HpctrainError(
            f"sync: async needs --backend mpi, whose ranks write to each other's memory; {backend!r} cannot",
            "choose --backend mpi; or --set sync.mode=local, with sync.every",
        )
    if plan.fault_tolerant and not capable.outlives_ranks:
        raise HpctrainError(
            f"fault_tolerance: shrink needs --backend mpi; {backend!r} ends with its first dead rank",
            "choose --backend mpi; --set fault_tolerance=stop ends the run resumably instead",
        )


def _require_strategy(plan: Plan, backend: str, capable: Capabilities) -> None:
    """Refuse what DeepSpeed and the strategies of tf.distribute cannot do as backends: too few ranks, or recipes
    whose steps do more than the strategies' scopes support.
    """
    if plan.recipe and capable.distributes_scripts:
        raise HpctrainError(
            f"backend {backend!r} is for scripts that bring a configuration of its own, and {plan.title} is a recipe",
            "choose --backend nccl, mpi or gloo; --mesh dp_shard=N with --set sharding.zero=1, 2 or 3 divides state",
        )
    if plan.ranks < capable.min_ranks:
        raise HpctrainError(
            f"backend {backend!r} needs {capable.min_ranks} ranks at least, and -np is {plan.ranks}: a coordinator, "
            "one that keeps the parameters, and the workers",
            f"-np {capable.min_ranks} or more",
        )
    if backend == "parameter_server" and plan.ranks < PARAMETER_SERVERS.read() + 2:
        raise HpctrainError(
            f"{PARAMETER_SERVERS.name}={PARAMETER_SERVERS.read()} leaves no worker of -np {plan.ranks}",
            f"-np {PARAMETER_SERVERS.read() + 2} or more",
        )
    if backend in _IN_SCOPE and plan.recipe:
        _require_plain(plan.recipe, backend)


def _require_plain(recipe: Recipe, backend: str) -> None:
    odd = {
        f"model: {recipe.model.name}, with batch normalisation": recipe.model.name != "digits_cnn",
        f"precision: {recipe.precision}": recipe.precision == "fp16",
        f"batch.micro_batch: {recipe.batch.micro_batch}": recipe.batch.micro_batch,
        "averaging": recipe.averaging,
        "mixing": recipe.mixing,
        "sync": recipe.sync,
        f"communication.compression: {recipe.communication.compression}": recipe.communication.compression != "none",
    }
    if found := next((name for name, is_odd in odd.items() if is_odd), None):
        raise HpctrainError(
            f"backend {backend!r} takes plain steps of networks without batch normalisation, and the recipe has "
            f"{found}",
            "choose --backend multi_worker, mpi or horovod",
        )


def _sends_largest(plan: Plan) -> bool:
    return plan.recipe is not None and plan.recipe.communication.compression == "top_k"


def _is_async(plan: Plan) -> bool:
    return plan.recipe is not None and plan.recipe.sync is not None and plan.recipe.sync.mode == "async"


def _backend(plan: Plan, hosts: Sequence[Slots], machine: Machine) -> tuple[str, str]:
    """The backend and the reason for it, which is empty for a backend that the user chose."""
    if asked := CAPABILITIES.get(plan.asked_backend):
        if not asked.joins_ranks:
            _require_single(plan, [host.host for host in hosts], machine)
        return plan.asked_backend, ""
    if _is_async(plan):
        return "mpi", "sync: async"
    # A single rank of an elastic run may be the rest of several, and others may join it.
    if plan.ranks == 1 and same_host(hosts[0].host, machine.host) and not plan.elastic:
        return "single", f"one rank on {machine.host}"
    if plan.start.launcher == TORCHRUN:
        return _without_mpi(plan, hosts, machine)
    if plan.fault_tolerant:
        return "mpi", "fault_tolerance: shrink"
    if _sends_largest(plan):
        return "mpi", "communication.compression: top_k"
    return _fitting(plan, hosts, machine)


def _without_mpi(plan: Plan, hosts: Sequence[Slots], machine: Machine) -> tuple[str, str]:
    """The backend among those whose ranks torchrun may start, and the reason."""
    backend, reason = _fitting(plan, hosts, machine)
    if not CAPABILITIES[backend].meets_without_mpi:
        backend, reason = "gloo", "torchrun"
    _require_backend(backend, plan)
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

"""The backend of a plan: what each can do with it, and which one ``auto`` chooses. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.common.cluster.backends import BACKENDS, CAPABILITIES
from hpctrain.common.cluster.gpus import fitting_backend, require_shareable
from hpctrain.common.cluster.launcher import TORCHRUN
from hpctrain.common.cluster.machine import Machine, same_host
from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.run.plan import Plan, Slots
from hpctrain.common.settings import PARAMETER_SERVERS

# Strategies whose scope makes the variables once for all replicas or workers.
_IN_SCOPE = ("mirrored", "parameter_server")
# Backends that reduce by NCCL where gradients are on GPUs.
_OVER_NCCL = ("nccl", "horovod")


def require_backend(backend: str, plan: Plan) -> None:
    """Refuse a backend that does not exist, or that cannot do what the plan asks for."""
    if backend not in BACKENDS:
        raise HpctrainError(
            "HT-choice-unknown", "unknown backend {backend!r}", nearest(backend, BACKENDS), backend=backend
        )
    capable = CAPABILITIES.get(backend)
    _require_sharing(plan, backend)
    if capable is None:
        return
    if plan.framework is not None and plan.framework not in capable.frameworks:
        own, other, backends = "PyTorch", "Keras", "mpi or horovod"
        if plan.framework == "torch":
            own, other, backends = "TensorFlow", "PyTorch", "mpi, nccl or gloo"
        remedy = f"choose --backend {backends}, or --framework {'torch' if own == 'PyTorch' else 'keras'}"
        raise _unfit(backend, f"reduces {own}'s gradients, and {plan.title} is to run in {other}", remedy)
    _require_strategy(plan, backend)
    if plan.start.launcher == TORCHRUN and capable.joins_ranks and not capable.meets_without_mpi:
        raise HpctrainError(
            "HT-backend-unfit",
            "backend {backend!r} needs ranks that MPI started, and torchrun is to start them",
            "choose --backend gloo or nccl, or --launcher auto",
            backend=backend,
        )
    if not plan.mesh.replicates_only and not capable.has_meshes:
        problem = f"has no groups of ranks for the mesh {plan.mesh}"
        raise _unfit(backend, problem, "choose --backend nccl, mpi or gloo")
    if _is_async(plan) and not capable.serves_parameters:
        problem = "cannot write to another rank's memory, as sync: async does"
        raise _unfit(backend, problem, "choose --backend mpi; or --set sync.mode=local, with sync.every")
    if plan.fault_tolerant and not capable.outlives_ranks:
        problem = "ends with its first dead rank, and fault_tolerance is shrink"
        raise _unfit(
            backend, problem, "choose --backend mpi; --set fault_tolerance=stop ends the run resumably instead"
        )


def _unfit(backend: str, problem: str, remedy: str) -> HpctrainError:
    return HpctrainError("HT-backend-unfit", "backend {backend!r} {problem}", remedy, backend=backend, problem=problem)


def _require_sharing(plan: Plan, backend: str) -> None:
    """Refuse to share GPUs where NCCL does not reduce the gradients."""
    if plan.start.share_gpus and backend not in ("auto", *_OVER_NCCL):
        remedy = "choose --backend nccl or horovod, or leave --share-gpus out"
        raise _unfit(backend, "does not reduce by NCCL, which --share-gpus is for", remedy)


def _require_strategy(plan: Plan, backend: str) -> None:
    """Refuse too few ranks for a strategy of tf.distribute, and recipes whose steps do more than its scope supports."""
    least = PARAMETER_SERVERS.read() + 2 if backend == "parameter_server" else 1
    if plan.ranks < least:
        problem = f"needs a coordinator, {least - 2} to keep the parameters, and a worker, and -np is {plan.ranks}"
        raise _unfit(backend, problem, f"-np {least} or more; {PARAMETER_SERVERS.name} says how many keep parameters")
    if backend not in _IN_SCOPE or plan.recipe is None:
        return
    recipe = plan.recipe
    odd = {
        f"model: {recipe.model.name}, with batch normalisation": recipe.model.family.normalises,
        f"precision: {recipe.precision}": recipe.precision == "fp16",
        f"batch.micro_batch: {recipe.batch.micro_batch}": recipe.batch.micro_batch,
        "averaging": recipe.averaging,
        "mixing": recipe.mixing,
        "sync": recipe.sync,
        f"communication.compression: {recipe.communication.compression}": recipe.communication.compression != "none",
    }
    if found := next((name for name, is_odd in odd.items() if is_odd), None):
        problem = f"takes plain steps of networks without batch normalisation, and the recipe has {found}"
        raise _unfit(backend, problem, "choose --backend multi_worker, mpi or horovod")


def _is_async(plan: Plan) -> bool:
    return plan.recipe is not None and plan.recipe.sync is not None and plan.recipe.sync.mode == "async"


def choose_backend(plan: Plan, hosts: Sequence[Slots], machine: Machine) -> tuple[str, str]:
    """The backend and the reason for it, which is empty for a backend that the user chose."""
    if plan.start.share_gpus:
        require_shareable((host.host, host.slots, host_gpus(host, machine)) for host in hosts)
    backend, reason = _choose(plan, hosts, machine)
    _require_sharing(plan, backend)
    return backend, reason


def _choose(plan: Plan, hosts: Sequence[Slots], machine: Machine) -> tuple[str, str]:
    if asked := CAPABILITIES.get(plan.asked_backend):
        if not asked.joins_ranks:
            _require_single(plan, [host.host for host in hosts], machine)
        return plan.asked_backend, ""
    if _is_async(plan):
        return "mpi", "sync: async"
    if plan.ranks == 1 and same_host(hosts[0].host, machine.host):
        return "single", f"one rank on {machine.host}"
    if plan.start.launcher == TORCHRUN:
        return _without_mpi(plan, hosts, machine)
    if plan.fault_tolerant:
        return "mpi", "fault_tolerance: shrink"
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
            "HT-backend-unfit",
            "backend {backend!r} is for one process, not for -np {ranks}",
            "choose --backend auto",
            backend=plan.asked_backend,
            ranks=plan.ranks,
        )
    if elsewhere := [host for host in hosts if not same_host(host, machine.host)]:
        problem = f"starts its process on this machine, {machine.host}, not on {elsewhere[0]}"
        raise _unfit(plan.asked_backend, problem, "choose --backend auto")


def _fitting(plan: Plan, hosts: Sequence[Slots], machine: Machine) -> tuple[str, str]:
    """The backend that fits the host with the fewest GPUs for its ranks, and the reason."""
    framework = plan.framework
    only = plan.start.container is None and machine.frameworks == {"torch"}
    if framework is None and (only or not plan.mesh.replicates_only):
        framework = "torch"
    host, gpus = min(((host, host_gpus(host, machine)) for host in hosts), key=lambda pair: pair[1] - pair[0].slots)
    name = host.host if host.places else machine.host
    backend, reason = fitting_backend(framework, gpus, host.slots, name, shared=plan.start.share_gpus)
    if plan.start.container is not None:
        return backend, reason
    capable = CAPABILITIES[backend]
    if capable.needs_gpus and machine.versions.get("torch", "").endswith("+cpu"):
        return "mpi", f"PyTorch {machine.versions['torch']} is built for CPUs"
    if capable.needs_build and framework is None and backend not in machine.versions:
        raise HpctrainError(
            "HT-backend-undecided",
            "which backend is for {title}? There is {gpus}, and Horovod, which serves either framework, is not built",
            "--backend nccl for PyTorch; for Keras --backend horovod, after: hpctrain horovod build",
            title=plan.title,
            gpus=reason.partition(", ")[2],
        )
    return backend, reason


def host_gpus(host: Slots, machine: Machine) -> int:
    """A host's GPUs for ranks: those of its places, or as many as this machine has."""
    if host.places:
        return sum(place.gpu is not None for place in host.places)
    return machine.gpus

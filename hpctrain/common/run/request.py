"""What is asked for of a training, whether it is possible, and which backend ``auto`` chooses for it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.common.cluster.backends import BACKENDS, CAPABILITIES
from hpctrain.common.cluster.gpus import fitting_backend, require_shareable
from hpctrain.common.cluster.launcher import WITHOUT_MPI
from hpctrain.common.cluster.machine import Machine, same_host
from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.recipes.families import Framework
from hpctrain.common.recipes.requirements import require_ranks, require_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.tracking import Tracker
from hpctrain.common.run.plan import HostOptions, Plan, Script, Slots, Start, Stop
from hpctrain.common.settings import PARAMETER_SERVERS

FRAMEWORKS: tuple[Framework, ...] = ("torch", "keras")
# Strategies whose scope makes the variables once for all replicas or workers.
_IN_SCOPE = ("mirrored", "parameter_server")
# Backends that reduce by NCCL where gradients are on GPUs.
_OVER_NCCL = ("nccl", "horovod")


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """What the user asks for: of a new run, of one that is resumed, or of a job.

    Attributes:
        work: the recipe, with the changes of ``--set``, or the script; None to resume a run with its own.
        ranks: their number; None for as many as the hosts have slots, or as the resumed run had.
        backend: one of :data:`hpctrain.common.cluster.backends.BACKENDS`; None for ``auto``, or for what the resumed
            run asked for.
        framework: for a recipe; None for PyTorch where it is installed, else Keras.
        host_options, start, stop: of a resumed run, what was given replaces the plan's.
        tracking: where the resumed run's curves go; None for where they went, or ``work``'s go.
        accept_changes: resume with another recipe or script than the run was begun with.
        submitted: a plan's file, with which a resumed run begins where its directory holds none.
        with_data: a recipe needs its data; False to place ranks alone.
    """

    work: Recipe | Script | None
    ranks: int | None = None
    backend: str | None = None
    framework: str | None = None
    host_options: HostOptions = field(default_factory=HostOptions)
    start: Start = field(default_factory=Start)
    stop: Stop = field(default_factory=Stop)
    overrides: tuple[str, ...] = ()
    mesh: str | None = None
    tracking: tuple[Tracker, ...] | None = None
    accept_changes: bool = False
    run_dir: Path | None = None
    submitted: Path | None = None
    dry_run: bool = False
    with_data: bool = True

    @property
    def changes(self) -> dict[str, dict[str, Any]]:
        """The options that were given, by the names of their groups: they replace those of a resumed run's plan."""
        groups = {"host_options": self.host_options, "start": self.start, "stop": self.stop}
        return {name: {key: getattr(group, key) for key in group.model_fields_set} for name, group in groups.items()}


def unplaced_plan(request: TrainingRequest, frameworks: frozenset[Framework]) -> Plan:
    """The plan of a run whose hosts are not known yet.

    ``auto`` is ``single`` for one rank on this machine, else ``mpi`` where the recipe goes on without ranks that die,
    else the backend of :func:`hpctrain.common.cluster.gpus.fitting_backend`.

    Args:
        frameworks: the installed ones. A container is assumed to have both, since it cannot be seen from outside.
    """
    work, ranks, backend = request.work, request.ranks, request.backend or "auto"
    assert work is not None and ranks is not None
    require_ranks(ranks)
    seen = frozenset(FRAMEWORKS) if request.start.container else frameworks
    plan = Plan(
        recipe=work.at(ranks) if isinstance(work, Recipe) else None,
        script=work if isinstance(work, Script) else None,
        framework=_framework(work, seen, request.framework),
        backend=backend,
        asked_backend=backend,
        ranks=ranks,
        host_options=request.host_options,
        start=request.start,
        stop=request.stop,
        threads_per_rank=1,
    )
    require_possible(plan, with_data=request.with_data)
    return plan


def _framework(work: Recipe | Script, installed: frozenset[Framework], framework: str | None) -> Framework | None:
    if isinstance(work, Script):
        if framework:
            raise HpctrainError(
                "HT-option-not-usable-here",
                "--framework {framework} is for recipes: {script} chooses by itself",
                "leave --framework out",
                framework=framework,
                script=work.path.name,
            )
        return None
    chosen = framework or ("keras" if installed == {"keras"} else "torch")
    if chosen not in FRAMEWORKS:
        raise HpctrainError(
            "HT-choice-unknown", "unknown framework {framework!r}", nearest(chosen, FRAMEWORKS), framework=chosen
        )
    if chosen not in installed:
        raise HpctrainError(
            "HT-package-not-installed",
            "{framework} is not installed in this Python",
            f"pip install 'hpctrain[{chosen}]'",
            framework=chosen,
        )
    return chosen


def require_possible(plan: Plan, *, with_data: bool = True) -> None:
    """Refuse what no hosts make possible: a mesh, a backend, or values of the recipe for the number of ranks.

    Args:
        with_data: as in :class:`TrainingRequest`.
    """
    _require_framework(plan)
    require_backend(plan.asked_backend, plan)
    if plan.recipe:
        require_recipe(plan.recipe, plan.ranks, with_data=with_data)


def _require_framework(plan: Plan) -> None:
    # Reading the mesh raises where it does not fit the ranks.
    mesh, recipe = plan.mesh, plan.recipe
    if plan.framework != "keras":
        return
    of_pytorch: dict[str, object] = {
        "--share-gpus": plan.start.share_gpus,
        f"the mesh {mesh}": not mesh.replicates_only,
    }
    if recipe:
        of_pytorch |= {
            "its network": "keras" not in recipe.model.family.frameworks,
            "batch.micro_batch: auto, which predicts PyTorch's memory,": recipe.batch.micro_batch == "auto",
            "model.frozen": recipe.model.frozen,
            "optimizer.rates": recipe.optimizer.rates,
            "averaging": recipe.averaging,
            "mixing": recipe.mixing,
            f"loss: {recipe.loss}": recipe.loss != "cross_entropy",
            f"compile: {recipe.compile}": recipe.compile in ("on", "graphs"),
            "data.decode: gpu": recipe.data.name == "imagenet" and recipe.data.decode == "gpu",
            "precision: fp16": recipe.precision == "fp16",
        }
    if feature := next((name for name, is_asked in of_pytorch.items() if is_asked), None):
        raise HpctrainError(
            "HT-only-in-pytorch",
            "{title} is to run in Keras, and {feature} is for PyTorch",
            "leave it out, or choose --framework torch for a run that begins anew",
            title=plan.title,
            feature=feature,
        )


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
    if plan.start.launcher in WITHOUT_MPI and capable.joins_ranks and not capable.meets_without_mpi:
        raise HpctrainError(
            "HT-backend-unfit",
            "backend {backend!r} needs ranks that MPI started, and {launcher} is to start them",
            "choose --backend gloo or nccl, or have mpirun or srun start the ranks",
            backend=backend,
            launcher=plan.start.launcher,
        )
    if not plan.mesh.replicates_only and not capable.has_meshes:
        problem = f"has no groups of ranks for the mesh {plan.mesh}"
        raise _unfit(backend, problem, "choose --backend nccl, mpi or gloo")
    if _is_async(plan) and not capable.serves_parameters:
        problem = "cannot write to another rank's memory, as sync.mode: async does"
        raise _unfit(backend, problem, "choose --backend mpi; or --set sync.mode=local, with sync.every")
    if plan.fault_tolerant and not capable.outlives_ranks:
        problem = "ends with its first dead rank, and fault_tolerance is shrink"
        raise _unfit(
            backend,
            problem,
            "choose --backend mpi; --set fault_tolerance.lost_rank=stop ends the run resumably instead",
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
        f"batch.micro_batch: {recipe.batch.micro_batch}": recipe.batch.micro_batch,
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
        without = plan.start.launcher in WITHOUT_MPI
        return _without_mpi(plan, hosts, machine) if without else ("mpi", "sync.mode: async")
    if plan.ranks == 1 and same_host(hosts[0].host, machine.host):
        return "single", f"one rank on {machine.host}"
    if plan.start.launcher in WITHOUT_MPI:
        return _without_mpi(plan, hosts, machine)
    if plan.fault_tolerant:
        return "mpi", "fault_tolerance.lost_rank: shrink"
    return _fitting(plan, hosts, machine)


def _without_mpi(plan: Plan, hosts: Sequence[Slots], machine: Machine) -> tuple[str, str]:
    """The backend among those whose ranks meet without MPI, and the reason."""
    backend, reason = _fitting(plan, hosts, machine)
    if not CAPABILITIES[backend].meets_without_mpi:
        backend, reason = "gloo", plan.start.launcher
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

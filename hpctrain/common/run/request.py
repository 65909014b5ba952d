"""What is asked for of a training, and whether it is possible, before its hosts are known. Pure."""

from __future__ import annotations

from hpctrain.common.cluster.backends import BACKENDS, CAPABILITIES, Capabilities
from hpctrain.common.cluster.launcher import TORCHRUN
from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.recipes.requirements import require_between, require_ranks, require_recipe
from hpctrain.common.recipes.schema import Framework, Recipe
from hpctrain.common.run.plan import HostOptions, Plan, Script, Start, Stop
from hpctrain.common.settings import PARAMETER_SERVERS

FRAMEWORKS: tuple[Framework, ...] = ("torch", "keras")
# Strategies whose scope makes the variables once for all replicas or workers.
_IN_SCOPE = ("mirrored", "parameter_server")
_REPLICATED = "dp_replicate=-1,dp_shard=1,pp=1,cp=1,tp=1"


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
    require_possible(plan)
    return plan


def _framework(work: Recipe | Script, installed: frozenset[Framework], framework: str | None) -> Framework | None:
    if isinstance(work, Script):
        if framework:
            raise HpctrainError(
                "HT-framework-for-recipes-only",
                "--framework {framework} is for recipes: {script} chooses by itself",
                "leave --framework out",
                framework=framework,
                script=work.path.name,
            )
        return None
    chosen = framework or ("keras" if installed == {"keras"} else "torch")
    for known in FRAMEWORKS:
        if chosen == known:
            if known not in installed:
                raise HpctrainError(
                    "HT-framework-not-installed",
                    "{framework} is not installed in this Python",
                    f"pip install 'hpctrain[{known}]'",
                    framework=known,
                )
            return known
    raise HpctrainError(
        "HT-framework-unknown", "unknown framework {framework!r}", nearest(chosen, FRAMEWORKS), framework=chosen
    )


def require_possible(plan: Plan) -> None:
    """Refuse what no hosts make possible: a mesh, a backend, or values of the recipe for the number of ranks."""
    _require_framework(plan)
    require_backend(plan.asked_backend, plan)
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
            "HT-framework-without-network",
            "the network of {title} is available only in PyTorch, not in Keras",
            "--framework torch",
            title=plan.title,
        )
    if not mesh.replicates_only:
        raise HpctrainError(
            "HT-mesh-needs-pytorch",
            "the mesh {mesh} needs PyTorch, and {title} is to run in Keras",
            f"choose --framework torch, or --mesh {_REPLICATED}",
            mesh=mesh,
            title=plan.title,
        )


def require_backend(backend: str, plan: Plan) -> None:
    if backend not in BACKENDS:
        raise HpctrainError(
            "HT-backend-unknown", "unknown backend {backend!r}", nearest(backend, BACKENDS), backend=backend
        )
    capable = CAPABILITIES.get(backend)
    if capable is None:
        return
    if plan.framework is not None and plan.framework not in capable.frameworks:
        (own, other), backends = (("PyTorch", "Keras"), "mpi or horovod")
        if plan.framework == "torch":
            own, other, backends = "TensorFlow", "PyTorch", "mpi, nccl or gloo"
        raise HpctrainError(
            "HT-backend-of-other-framework",
            "backend {backend!r} reduces {own}'s gradients, and {title} is to run in {other}",
            f"choose --backend {backends}, or --framework {'torch' if own == 'PyTorch' else 'keras'}",
            backend=backend,
            own=own,
            title=plan.title,
            other=other,
        )
    _require_strategy(plan, backend, capable)
    if plan.start.launcher == TORCHRUN and capable.joins_ranks and not capable.meets_without_mpi:
        raise HpctrainError(
            "HT-backend-needs-mpi",
            "backend {backend!r} needs ranks that MPI started, and torchrun is to start them",
            "choose --backend gloo or nccl, or --launcher auto",
            backend=backend,
        )
    if not plan.mesh.replicates_only and not capable.has_meshes:
        raise HpctrainError(
            "HT-backend-without-groups",
            "backend {backend!r} has no groups of ranks for the mesh {mesh}",
            "choose --backend nccl, mpi or gloo",
            backend=backend,
            mesh=plan.mesh,
        )
    if sends_largest(plan) and not capable.sends_largest:
        raise HpctrainError(
            "HT-backend-without-compression",
            "communication.compression: top_k needs --backend mpi; {backend!r} sends all gradients",
            "choose --backend mpi; or --set communication.compression=bf16",
            backend=backend,
        )
    if is_async(plan) and not capable.serves_parameters:
        raise HpctrainError(
            "HT-backend-without-async",
            "sync: async needs --backend mpi, whose ranks write to each other's memory; {backend!r} cannot",
            "choose --backend mpi; or --set sync.mode=local, with sync.every",
            backend=backend,
        )
    if plan.fault_tolerant and not capable.outlives_ranks:
        raise HpctrainError(
            "HT-backend-without-shrink",
            "fault_tolerance: shrink needs --backend mpi; {backend!r} ends with its first dead rank",
            "choose --backend mpi; --set fault_tolerance=stop ends the run resumably instead",
            backend=backend,
        )


def _require_strategy(plan: Plan, backend: str, capable: Capabilities) -> None:
    """Refuse what DeepSpeed and the strategies of tf.distribute cannot do as backends: too few ranks, or recipes
    whose steps do more than the strategies' scopes support.
    """
    if plan.recipe and capable.distributes_scripts:
        raise HpctrainError(
            "HT-backend-for-scripts-only",
            "backend {backend!r} is for scripts that bring a configuration of its own, and {title} is a recipe",
            "choose --backend nccl, mpi or gloo; --mesh dp_shard=N with --set sharding.zero=1, 2 or 3 divides state",
            backend=backend,
            title=plan.title,
        )
    if plan.ranks < capable.min_ranks:
        raise HpctrainError(
            "HT-backend-needs-more-ranks",
            "backend {backend!r} needs {least} ranks at least, and -np is {ranks}: a coordinator, one "
            "that keeps the parameters, and the workers",
            f"-np {capable.min_ranks} or more",
            backend=backend,
            least=capable.min_ranks,
            ranks=plan.ranks,
        )
    if backend == "parameter_server" and plan.ranks < PARAMETER_SERVERS.read() + 2:
        raise HpctrainError(
            "HT-backend-without-workers",
            "{variable}={servers} leaves no worker of -np {ranks}",
            f"-np {PARAMETER_SERVERS.read() + 2} or more",
            variable=PARAMETER_SERVERS.name,
            servers=PARAMETER_SERVERS.read(),
            ranks=plan.ranks,
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
            "HT-backend-for-plain-networks",
            "backend {backend!r} takes plain steps of networks without batch normalisation, and the recipe has {found}",
            "choose --backend multi_worker, mpi or horovod",
            backend=backend,
            found=found,
        )


def sends_largest(plan: Plan) -> bool:
    return plan.recipe is not None and plan.recipe.communication.compression == "top_k"


def is_async(plan: Plan) -> bool:
    return plan.recipe is not None and plan.recipe.sync is not None and plan.recipe.sync.mode == "async"

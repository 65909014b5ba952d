"""What DeepSpeed and the strategies of tf.distribute cannot do as backends, refused before anything starts."""

from __future__ import annotations

from hpctrain.common.cluster.backends import Capabilities
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.plan import Plan
from hpctrain.common.settings import PARAMETER_SERVERS

# Those in whose scope variables are made once for all replicas or workers.
_IN_SCOPE = ("mirrored", "parameter_server")


def require_strategy(plan: Plan, backend: str, capable: Capabilities) -> None:
    """Refuse ranks and recipes that a backend is not for.

    Raises:
        HpctrainError: too few ranks, or a recipe with more to its steps than the strategies' scopes have.
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

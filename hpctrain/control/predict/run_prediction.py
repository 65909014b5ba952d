"""The prediction for one run of a recipe, whose number of ranks is known."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.common.cluster.backends import CAPABILITIES
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.requirements import require_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.plan import Plan
from hpctrain.control.predict.hardware import Hardware
from hpctrain.control.predict.memory import largest_batch, memory
from hpctrain.control.predict.micro_batch import memory_settings
from hpctrain.control.predict.prediction import Prediction, Row
from hpctrain.control.predict.request import PredictionRequest, recipe_request
from hpctrain.control.predict.training import recipe_training
from hpctrain.control.predict.transformers.layout import Layout
from hpctrain.control.predict.transformers.memory import memory as transformer_memory
from hpctrain.control.predict.values import Estimate


@dataclass(frozen=True, kw_only=True)
class RunPrediction:
    """The prediction for one run of a recipe.

    Attributes:
        epochs: that the run trains for; those of the row may be fewer, as it may reach its result earlier.
        at_once: samples that a rank computes together.
        micro_batch: the most that it could, and has memory for, with the recipe's other values; None for none.
    """

    prediction: Prediction
    epochs: int
    at_once: int
    micro_batch: int | None = None

    @property
    def row(self) -> Row:
        """The figures of the only number of nodes."""
        return self.prediction.rows[0]

    @property
    def minutes(self) -> Estimate | None:
        """The time of all its epochs; None where the size of the data is not known."""
        found, epochs = self.row.minutes, self.row.epochs
        if found is None or epochs is None:
            return None
        return found.scaled(self.epochs / epochs.value)

    @property
    def memory_warning(self) -> str | None:
        """A sentence if a GPU has no memory for the samples that it is to compute at once; None otherwise."""
        most = self.row.largest_batch
        if most is None or self.at_once <= most:
            return None
        gpu = self.prediction.node.gpu
        remedy = f"--set batch.micro_batch={self.micro_batch} cuts them" if self.micro_batch else "take other GPUs"
        return f"a rank computes {self.at_once} samples at once, but the memory of {gpu} has room for {most}: {remedy}"


def predict_run(recipe: Recipe, plan: Plan, hardware: Hardware, nodes: int) -> RunPrediction:
    """The prediction for a run.

    Args:
        recipe: not resolved for a number of ranks, as the efficiency is against one node.

    Raises:
        HpctrainError: ranks share GPUs, or see :func:`predict_request`.
    """
    if plan.start.share_gpus:
        raise HpctrainError("HT-prediction-not-possible", "the ranks share GPUs, and a prediction is for one each")
    asked = PredictionRequest(
        hardware=hardware, nodes=[nodes], backend=_backend(plan), framework=plan.framework or "torch"
    )
    if recipe.batch.micro_batch == "auto" and plan.recipe and isinstance(plan.recipe.batch.micro_batch, int):
        recipe = recipe.computing(plan.recipe.batch.micro_batch)
    found = recipe_request(recipe, asked)
    return RunPrediction(
        prediction=found,
        epochs=recipe.epochs,
        at_once=found.rows[0].at_once,
        micro_batch=_micro_batch(recipe, plan.ranks, found.rows[0].largest_batch or 0),
    )


def shared_memory_warning(plan: Plan, device_bytes: int, gpus: int) -> str | None:
    """A sentence if the ranks that share a GPU have no room in it together.

    None where they have, and where the memory of a rank cannot be predicted or is still to be divided.

    Args:
        device_bytes: the memory of one GPU.
        gpus: the host's, which its ranks share.
    """
    if plan.recipe is None or plan.recipe.batch.micro_batch == "auto":
        return None
    each = -(-plan.ranks // gpus)
    taken, remedy = _rank_bytes(plan.recipe, plan.ranks, device_bytes / each)
    if each * taken <= device_bytes:
        return None
    return (
        f"{each} ranks share a GPU of {device_bytes / 1e9:.3g} GB and take about {each * taken / 1e9:.3g} GB of it: "
        f"{remedy}"
    )


def _rank_bytes(recipe: Recipe, ranks: int, room: float) -> tuple[float, str]:
    """The memory of a rank, and what to do where there is room for less; 0 where it cannot be predicted."""
    if recipe.model.name == "gpt":
        layout = Layout.of_recipe(recipe, ranks)
        needed = transformer_memory(recipe.model.transformer, layout)
        return needed.used, "; ".join([*needed.reductions(layout)[:2], "start fewer ranks"])
    try:
        training = recipe_training(recipe)
    except HpctrainError:
        return 0, ""
    settings = memory_settings(training, ranks)
    try:
        most = largest_batch(training.largest, room, settings)
    except HpctrainError:
        most = 0
    size = _micro_batch(recipe, ranks, most)
    taken = memory(training.largest, batch=recipe.batch.at_once(ranks), settings=settings).total
    return taken, f"--set batch.micro_batch={size} cuts a rank's samples" if size else "start fewer ranks"


def _micro_batch(recipe: Recipe, ranks: int, most: int) -> int | None:
    """One that the recipe can have: the largest that cuts a rank's share into parts of one size; where that would be
    less than half of what there is memory for, all of it goes before.
    """
    data_ranks = recipe.mesh.at(ranks).data_ranks
    share = recipe.at(ranks).global_batch // data_ranks
    if recipe.mesh.at(ranks).pp > 1:
        return None
    equal = [size for size in range(min(most, share), 0, -1) if share % size == 0]
    large = [size for size in equal if 2 * size >= most]
    for size in [*large, *filter(None, [most]), *equal[len(large) :]]:
        try:
            require_recipe(recipe.computing(size).at(ranks), ranks)
        except HpctrainError:
            continue
        return size
    return None


def plan_hardware(plan: Plan, gpu: str) -> tuple[Hardware, int]:
    """The nodes of a plan that has its hosts, if all are alike, and how many.

    Raises:
        HpctrainError: hosts with different numbers of ranks.
    """
    slots = {host.slots for host in plan.hosts}
    if len(slots) != 1:
        raise HpctrainError(
            "HT-prediction-not-possible",
            "the hosts have different numbers of ranks, and a prediction is for nodes that are alike",
        )
    adapters = {place.adapter for place in plan.hosts[0].places if place.adapter is not None}
    options = plan.host_options
    hardware = Hardware(
        gpu=gpu,
        gpus_per_node=slots.pop(),
        adapters=len(adapters) or None,
        fabric=options.fabric,
        routes=options.routes,
        topology=options.topology,
        hosts=tuple(host.host for host in plan.hosts),
    )
    return hardware, len(plan.hosts)


def _backend(plan: Plan) -> str:
    """The backend of the run; ``auto``, with which the prediction chooses by the GPUs, if it is not chosen yet."""
    found = CAPABILITIES.get(plan.backend)
    return plan.backend if found and found.joins_ranks else "auto"

"""The largest micro-batch with which a rank of a recipe fits its memory."""

from __future__ import annotations

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.requirements import require_parts
from hpctrain.common.recipes.schema import Recipe
from hpctrain.control.predict.memory import MemorySettings, memory
from hpctrain.control.predict.training import recipe_training
from hpctrain.control.predict.transformers.layout import Layout, divisors
from hpctrain.control.predict.transformers.rank_memory import memory as transformer_memory

SHARE = 0.9
"""Of a rank's memory, what its predicted memory may be."""


def fitting(recipe: Recipe, ranks: int, room: float) -> int:
    """The largest micro-batch that cuts a rank's share of a step into equal parts and fits into ``room`` bytes.

    Raises:
        HpctrainError: the memory of the recipe's network cannot be predicted on its mesh, not even the smallest
            micro-batch has room, or see :func:`hpctrain.common.recipes.requirements.require_parts`.
    """
    recipe = recipe.at(ranks)
    share = -(-recipe.global_batch // recipe.mesh.at(ranks).data_ranks)
    least, refusal = None, None
    for size in reversed(divisors(share)):
        candidate = recipe.computing(size)
        try:
            require_parts(candidate, ranks)
        except HpctrainError as error:
            refusal = error
            continue
        try:
            least = rank_bytes(candidate, ranks)
        except HpctrainError as error:
            raise error.but(before="batch.micro_batch: auto: ", hint="--set batch.micro_batch=N") from error
        if least <= SHARE * room:
            return size
    if least is None:
        assert refusal is not None
        raise refusal
    raise HpctrainError(
        "HT-memory-exceeded",
        "batch.micro_batch: auto: the smallest micro-batch of {title} takes about {needed:.3g} GB, which is more than "
        "{percent:.0f} % of the {available:.3g} GB that a rank has",
        "choose bf16, recomputation (sharding.recompute), a mesh that divides the model, or fewer ranks on a host; "
        "--set batch.micro_batch=N tries without a prediction",
        title=recipe.name,
        needed=least / 1e9,
        percent=100 * SHARE,
        available=room / 1e9,
    )


def rank_bytes(recipe: Recipe, ranks: int) -> float:
    """The predicted memory of a rank, for a recipe whose micro-batch is known."""
    if recipe.model.family.predicts_tokens:
        return transformer_memory(recipe.model.transformer, Layout.of_recipe(recipe, ranks)).used
    training = recipe_training(recipe)
    settings = MemorySettings(
        optimizer=training.optimizer,
        precision=training.precision,
        compressed=training.communication.compression != "none",
        parts=training.parts(ranks),
    )
    return memory(training.largest, batch=recipe.batch.at_once(ranks), settings=settings).used

"""How images that share batch statistics are distributed over ranks."""

from __future__ import annotations

from typing import Literal

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.schema import Recipe


def ranks_together(span: int | Literal["world"] | None, at_once: int, ranks: int) -> int:
    """How many ranks hold ``span`` images together; 1 if one rank has as many or more.

    Args:
        span: images that share their statistics, of a recipe.
        at_once: images that each rank computes at once.

    Raises:
        HpctrainError: they cannot be whole ranks, or groups of so many are not all ranks.
    """
    if span is None or span == "world":
        return ranks if span else 1
    size, rest = divmod(span, at_once)
    if size == 0 or (not rest and ranks % size == 0):
        return max(1, size)
    possible = [at_once * count for count in range(1, ranks + 1) if ranks % count == 0]
    why = f"is not a multiple of the {at_once} images that a rank computes at once"
    if not rest:
        why = f"is what {size} ranks compute at once ({at_once} each), and {ranks} ranks do not make groups of {size}"
    raise HpctrainError(
        "HT-batch-norm-span-not-divisible",
        "model.batch_norm.span={span} {reason}",
        f"with {ranks} ranks and {at_once} images each it is {', '.join(map(str, possible))} or world, or at most "
        f"{at_once}; batch.size, batch.per_rank and batch.micro_batch say how many images a rank computes at once",
        span=span,
        reason=why,
    )


def require_span(recipe: Recipe, ranks: int) -> None:
    """Refuse a span that does not fit the ranks' shares of a batch, before anything is started.

    Args:
        recipe: the result of :meth:`~hpctrain.common.recipes.schema.Recipe.at` for the ranks.
        ranks: the number of data-parallel ranks.

    Raises:
        HpctrainError: statistics would be over other numbers of images than ``model.batch_norm.span``, or over ranks of
            which the run goes on without some.
    """
    span = recipe.model.batch_norm.span
    at_once = recipe.batch.at_once(ranks)
    together = ranks_together(span, at_once, ranks)
    alone = {
        "fault_tolerance=stop": recipe.fault_tolerance.fault_tolerant and "shrink continues without some of them",
        "sync=null": recipe.sync and "sync lets each take steps by itself",
    }
    for remedy, reason in alone.items():
        if together > 1 and reason:
            raise HpctrainError(
                "HT-keys-not-together",
                "model.batch_norm.span={span} joins {together} ranks in each step, and {reason}",
                f"--set {remedy}, or --set model.batch_norm.span={at_once} keeps statistics within a rank",
                span=span,
                together=together,
                reason=reason,
            )
    if span is None or span == "world":
        return
    faults = {
        f"needs parts of equal size, and batch.size={recipe.global_batch} over {ranks} ranks has parts of {at_once} "
        "and fewer images": (
            recipe.global_batch % (ranks * at_once),
            f"choose -np and batch.micro_batch so that their product divides {recipe.global_batch}",
        ),
        f"does not divide the {at_once} images that a rank computes at once": (
            together == 1 and at_once % span,
            f"--set batch.micro_batch={span}, or --set model.batch_norm.span={at_once}",
        ),
    }
    for reason, (is_fault, remedy) in faults.items():
        if is_fault:
            raise HpctrainError(
                "HT-batch-norm-span-not-divisible",
                "model.batch_norm.span={span} {reason}",
                remedy,
                span=span,
                reason=reason,
                ranks=ranks,
                images=at_once,
            )

"""How images that share batch statistics are distributed over ranks."""

from __future__ import annotations

from collections.abc import Iterator
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
    why = f"is not a multiple of the {at_once} images that a rank computes at once"
    if not rest:
        why = f"is what {size} ranks compute at once ({at_once} each), and {ranks} ranks do not make groups of {size}"
    possible = [at_once * count for count in range(1, ranks + 1) if ranks % count == 0]
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
    at_once = recipe.batch.at_once(ranks)
    together = ranks_together(recipe.model.batch_norm.span, at_once, ranks)
    for code, reason, remedy in _span_faults(recipe, ranks, at_once, together):
        raise HpctrainError(
            code,
            "model.batch_norm.span={span} {reason}",
            remedy,
            span=recipe.model.batch_norm.span,
            reason=reason,
            together=together,
            ranks=ranks,
            images=at_once,
        )


def _span_faults(recipe: Recipe, ranks: int, at_once: int, together: int) -> Iterator[tuple[str, str, str]]:
    """Codes, what is wrong with a span, and remedies."""
    span, joins = recipe.model.batch_norm.span, f"joins {together} ranks in each step"
    own = f"--set model.batch_norm.span={at_once} keeps statistics within a rank"
    if together > 1 and recipe.fault_tolerance.fault_tolerant:
        reason = f"{joins}, and shrink continues without some of them"
        yield "HT-keys-not-together", reason, f"--set fault_tolerance=stop, or {own}"
    if together > 1 and recipe.sync:
        yield "HT-keys-not-together", f"{joins}, and sync lets each take steps by itself", f"--set sync=null, or {own}"
    if not isinstance(span, int):
        return
    if recipe.global_batch % (ranks * at_once):
        yield (
            "HT-batch-norm-span-not-divisible",
            f"needs parts of equal size, and batch.size={recipe.global_batch} over {ranks} ranks has parts of "
            f"{at_once} and fewer images",
            f"choose -np and batch.micro_batch so that their product divides {recipe.global_batch}",
        )
    if together == 1 and at_once % span:
        yield (
            "HT-batch-norm-span-not-divisible",
            f"does not divide the {at_once} images that a rank computes at once",
            f"--set batch.micro_batch={span}, or --set model.batch_norm.span={at_once}",
        )

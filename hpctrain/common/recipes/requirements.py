"""Checks of a recipe against its run, before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.common.recipes.schema import Recipe

_ONE_STAGE_A_RANK = ("gpipe", "1f1b")


def require_ranks(ranks: int) -> None:
    """Refuse a run without ranks."""
    if ranks < 1:
        raise HpctrainError(
            "HT-ranks-too-few", "-np {ranks}: a run needs at least one rank", "for example -np 2", ranks=ranks
        )


def require_recipe(recipe: Recipe, ranks: int, *, with_data: bool = True) -> None:
    """Refuse values that do not fit this number of ranks, or whose data is missing.

    Args:
        recipe: from :meth:`~hpctrain.common.recipes.schema.Recipe.at`, for the ranks that the run began with.
        ranks: the current number of ranks.
        with_data: whether it needs its data.

    Raises:
        HpctrainError: a mesh that is not of so many ranks, or that divides a model's heads unevenly or into more stages
            than it has blocks, no ``data.path``; see also :func:`require_parts`.
    """
    _require_least(recipe.fault_tolerance.min_ranks, ranks)
    _require_divisible(recipe, recipe.mesh.at(ranks))
    require_parts(recipe, ranks)
    if with_data and has_folder(recipe):
        shard_folder(recipe)


def require_parts(recipe: Recipe, ranks: int) -> None:
    """Refuse samples at once that the ranks' stages or statistics cannot have.

    Raises:
        HpctrainError: micro-batches that a pipeline's stages cannot have, or see
            :func:`require_span`.
    """
    mesh = recipe.mesh.at(ranks)
    require_span(recipe, mesh.data_ranks)
    require_micro_batches(recipe, mesh)


def _require_least(least: int, ranks: int) -> None:
    """Refuse fewer ranks than ``fault_tolerance.min_ranks``."""
    if ranks < least:
        raise HpctrainError(
            "HT-ranks-too-few",
            "fault_tolerance.{key} is {bound}, and the run has {ranks} ranks",
            f"-np {least}, or --set fault_tolerance.min_ranks={ranks}",
            key="min_ranks",
            bound=least,
            ranks=ranks,
        )


def _require_divisible(recipe: Recipe, mesh: Mesh) -> None:
    """Refuse to divide a GPT into more parts than it has."""
    model, sizes, schedule = recipe.model, mesh.sizes, recipe.pipeline.schedule
    if not model.family.predicts_tokens:
        return
    stages = sizes["pp"] * (1 if schedule in _ONE_STAGE_A_RANK else 2)
    if model.heads % sizes["tp"]:
        possible = ", ".join(str(size) for size in range(1, model.heads + 1) if model.heads % size == 0)
        problem = f"mesh.tp: {sizes['tp']} ranks cannot share the {model.heads} heads of each block evenly"
        raise _undivided(problem, f"--mesh tp=N with one of {possible}")
    if stages > model.layers:
        problem = f"mesh.pp: {sizes['pp']} ranks make {stages} stages with pipeline.schedule {schedule}, and the model"
        raise _undivided(f"{problem} has {model.layers} blocks", "fewer ranks along pp, or more model.layers")


def _undivided(problem: str, remedy: str) -> HpctrainError:
    return HpctrainError("HT-model-not-divisible", "{problem}", remedy, problem=problem)


def require_micro_batches(recipe: Recipe, mesh: Mesh) -> None:
    """Refuse micro-batches that torch.distributed.pipelining's schedules cannot have, or of several sizes.

    Args:
        recipe: see :func:`require_recipe`.
    """
    if mesh.sizes["pp"] == 1:
        return
    for problem, remedy in _micro_batch_faults(recipe, mesh):
        raise HpctrainError(
            "HT-pipeline-wrong-micro-batches",
            "{problem}",
            f"--set pipeline.micro_batches={remedy}",
            problem=problem,
        )


def _micro_batch_faults(recipe: Recipe, mesh: Mesh) -> Iterator[tuple[str, str]]:
    """What is wrong with the micro-batches of a pipeline, and the number to take instead."""
    stages, schedule = mesh.sizes["pp"], recipe.pipeline.schedule
    count, samples = recipe.pipeline.count(stages), recipe.batch.at_once(mesh.data_ranks)
    if samples % count:
        sizes = (size for size in range(1, samples + 1) if samples % size == 0)
        yield (
            f"{count} micro-batches of equal size cannot be made from the {samples} samples that each of "
            f"{mesh.data_ranks} data-parallel ranks computes at once",
            f"{min(sizes, key=lambda size: abs(size - count))}, or another batch",
        )
    if schedule == "1f1b" and count < stages:
        yield (
            f"pipeline.schedule: 1f1b needs as many micro-batches as stages ({stages}), and there are {count}",
            f"{stages}, or --set pipeline.schedule=gpipe",
        )
    rounds = max(1, count // stages)
    if schedule.startswith("interleaved") and count % rounds:
        yield (
            f"pipeline.schedule: {schedule} runs in {rounds} rounds of {stages} stages, which do not divide {count} "
            "micro-batches",
            f"{rounds * stages}",
        )


def has_folder(recipe: Recipe) -> bool:
    """Whether the recipe's samples are in a folder of shards.

    Digits ship with scikit-learn, and a small run without text of its own reads what ships with Python.
    """
    ships = recipe.smoke and not recipe.data.path
    return recipe.data.name == "imagenet" or (recipe.data.name == "text" and not ships)


def shard_folder(recipe: Recipe) -> Path:
    """The folder of shards of a recipe on imagenet or text.

    Raises:
        HpctrainError: the recipe does not say.
    """
    if recipe.data.path:
        return Path(recipe.data.path).expanduser()
    kind, made = "ImageNet's shards", "shard SOURCE DIR makes it"
    if recipe.data.name == "text":
        kind, made = "the text's tokens", "prepare-text SOURCE DIR --tokenizer FILE makes it; --smoke needs none"
    raise HpctrainError(
        "HT-recipe-needs-data-path",
        "recipe {recipe} needs data.path, the folder of {kind}",
        f"--set data.path=DIR; hpctrain data {made}",
        recipe=recipe.name,
        kind=kind,
    )


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
        yield "HT-keys-not-together", reason, f"--set fault_tolerance.lost_rank=stop, or {own}"
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

"""Checks of a recipe against its run, before anything is started."""

from __future__ import annotations

from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.objects import is_url
from hpctrain.common.recipes.batch_statistics import require_span
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.common.recipes.reliability import FaultTolerance
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
            than it has blocks, no ``data.path``; see also :func:`require_between` and :func:`require_parts`.
    """
    require_between(recipe.fault_tolerance, ranks)
    _require_divisible(recipe, recipe.mesh.at(ranks))
    require_parts(recipe, ranks)
    if with_data and has_folder(recipe):
        shard_folder(recipe)


def require_parts(recipe: Recipe, ranks: int) -> None:
    """Refuse samples at once that the ranks' stages or statistics cannot have.

    Raises:
        HpctrainError: micro-batches that a pipeline's stages cannot have, or see
            :func:`~hpctrain.common.recipes.batch_statistics.require_span`.
    """
    mesh = recipe.mesh.at(ranks)
    require_span(recipe, mesh.data_ranks)
    require_micro_batches(recipe, mesh)


def require_between(faults: FaultTolerance, ranks: int) -> None:
    """Refuse fewer ranks than ``fault_tolerance.min_ranks``, and more than ``max_ranks``.

    Raises:
        HpctrainError: there are.
    """
    least, most = faults.min_ranks, faults.max_ranks
    if least > ranks:
        raise HpctrainError(
            "HT-ranks-too-few",
            "fault_tolerance.min_ranks is {least}, and the run has {ranks} ranks",
            f"-np {least}, or --set fault_tolerance.min_ranks={ranks}",
            least=least,
            ranks=ranks,
        )
    if most is not None and most < ranks:
        raise HpctrainError(
            "HT-ranks-too-many",
            "fault_tolerance.max_ranks is {most}, and the run has {ranks} ranks",
            f"-np {most}, or --set fault_tolerance.max_ranks={ranks}",
            most=most,
            ranks=ranks,
        )


def _require_divisible(recipe: Recipe, mesh: Mesh) -> None:
    """Refuse to divide a GPT into more parts than it has."""
    model, sizes = recipe.model, mesh.sizes
    if model.name != "gpt":
        return
    if model.heads % sizes["tp"]:
        possible = [str(size) for size in range(1, model.heads + 1) if model.heads % size == 0]
        raise HpctrainError(
            "HT-model-not-divisible",
            "mesh.tp: {ranks} ranks cannot share the {heads} heads of each block evenly",
            f"--mesh tp=N with one of {', '.join(possible)}",
            ranks=sizes["tp"],
            heads=model.heads,
        )
    stages = sizes["pp"] * (1 if recipe.pipeline.schedule in _ONE_STAGE_A_RANK else 2)
    if stages > model.layers:
        raise HpctrainError(
            "HT-model-not-divisible",
            "mesh.pp: {ranks} ranks make {stages} stages with pipeline.schedule {schedule}, and the "
            "model has {blocks} blocks",
            "fewer ranks along pp, or more model.layers",
            ranks=sizes["pp"],
            stages=stages,
            schedule=recipe.pipeline.schedule,
            blocks=model.layers,
        )


def require_micro_batches(recipe: Recipe, mesh: Mesh) -> None:
    """Refuse micro-batches that torch.distributed.pipelining's schedules cannot have, or of several sizes.

    Args:
        recipe: see :func:`require_recipe`.
    """
    stages = mesh.sizes["pp"]
    if stages == 1:
        return
    count, samples = recipe.pipeline.count(stages), recipe.batch.at_once(mesh.data_ranks)
    if samples % count:
        possible = [size for size in range(1, samples + 1) if samples % size == 0]
        raise HpctrainError(
            "HT-pipeline-wrong-micro-batches",
            "{count} micro-batches of equal size cannot be made from the {samples} samples that each of "
            "{data_ranks} data-parallel ranks computes at once",
            f"--set pipeline.micro_batches={min(possible, key=lambda size: abs(size - count))}, or another batch",
            count=count,
            samples=samples,
            data_ranks=mesh.data_ranks,
        )
    if recipe.pipeline.schedule == "1f1b" and count < stages:
        raise HpctrainError(
            "HT-pipeline-wrong-micro-batches",
            "pipeline.schedule: 1f1b needs as many micro-batches as stages ({stages}), and there are {count}",
            f"--set pipeline.micro_batches={stages}, or --set pipeline.schedule=gpipe",
            stages=stages,
            count=count,
        )
    rounds = max(1, count // stages)
    if recipe.pipeline.schedule.startswith("interleaved") and count % rounds:
        raise HpctrainError(
            "HT-pipeline-wrong-micro-batches",
            "pipeline.schedule: {schedule} runs in {rounds} rounds of {stages} stages, which do not "
            "divide {count} micro-batches",
            f"--set pipeline.micro_batches={rounds * stages}",
            schedule=recipe.pipeline.schedule,
            rounds=rounds,
            stages=stages,
            count=count,
        )


def has_folder(recipe: Recipe) -> bool:
    """Whether the recipe's samples are in a folder of shards; others are in object storage, or ship with packages."""
    if shard_url(recipe):
        return False
    return recipe.data.name == "imagenet" or (recipe.data.name == "text" and not _ships(recipe))


def shard_url(recipe: Recipe) -> str | None:
    """The URL of the recipe's shards in object storage; None where they are elsewhere."""
    path = recipe.data.path
    return path if recipe.data.name != "digits" and path and is_url(path) else None


def _ships(recipe: Recipe) -> bool:
    """Whether a small run has no text of its own, and reads what Python brings along."""
    return recipe.smoke and not recipe.data.path


def shard_folder(recipe: Recipe) -> Path:
    """The folder of shards of a recipe on imagenet or text.

    Raises:
        HpctrainError: the recipe does not say.
    """
    if recipe.data.path:
        return Path(recipe.data.path).expanduser()
    if recipe.data.name == "text":
        raise HpctrainError(
            "HT-recipe-needs-data-path",
            "recipe {recipe} needs data.path, the folder of the text's tokens, or its URL",
            "--set data.path=DIR; hpctrain data prepare-text SOURCE DIR --tokenizer FILE makes it; --smoke needs none",
            recipe=recipe.name,
        )
    raise HpctrainError(
        "HT-recipe-needs-data-path",
        "recipe {recipe} needs data.path, the folder of ImageNet's shards, or its URL",
        "--set data.path=DIR; hpctrain data shard SOURCE DIR makes it, hpctrain data fake a small one to try",
        recipe=recipe.name,
    )

"""Which keys of a recipe cannot be combined, whatever ranks there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpctrain.common.recipes.keys import enumerated
from hpctrain.common.recipes.mesh import FILL, Axis, Pipeline, Sharding

if TYPE_CHECKING:
    from hpctrain.common.recipes.sections import RecipeKeys

_WITHOUT: dict[Axis, str] = {
    "pp": "has no blocks to make stages of",
    "cp": "has no attention that divides sequences",
    "tp": "has no plan by which its layers are divided",
}
# Changes of an image that only the processor makes.
_BY_PROCESSES = ("augmentation", "erasing")


def incompatibilities(recipe: RecipeKeys) -> Iterator[str]:
    """The keys of several sections that cannot be combined."""
    for group in (_of_model, _of_length, _of_sync, _of_axes, _of_mesh):
        yield from group(recipe)
    if recipe.compile in ("on", "graphs") and (problem := uncompilable(recipe)):
        yield problem
    elif recipe.compile == "graphs" and not recipe.mesh.replicates_only:
        yield (
            f"compile: graphs with mesh {recipe.mesh}: a CUDA graph finds parameters where they were, and divided ones "
            "are gathered elsewhere each time; --set compile=on"
        )
    elif recipe.compile == "graphs" and recipe.sharding.recompute:
        yield (
            "compile: graphs with sharding.recompute: what is computed again takes the place of what a graph keeps; "
            "--set compile=on"
        )


def _of_model(recipe: RecipeKeys) -> Iterator[str]:
    """The network with its data, its loss, and what begins with given weights or trains a part of it otherwise."""
    model, data, family, span = recipe.model, recipe.data, recipe.model.family, recipe.model.batch_norm.span
    if data.name not in family.data:
        remedy = "--set data.name=text" if family.predicts_tokens else "--set model.name=gpt, or another data.name"
        yield f"model.name: {model.name} does not go with data.name: {data.name}; {remedy}"
    if family.predicts_tokens and recipe.loss != "cross_entropy":
        yield f"loss: {recipe.loss} is for images; --set loss=cross_entropy"
    changes = [name for name in _BY_PROCESSES if getattr(recipe.images, name)]
    if data.name == "imagenet" and data.decode == "gpu" and changes:
        yield (
            f"data.decode: gpu cuts, resizes and mirrors photographs, and cannot do images.{changes[0]}; "
            "--set data.decode=scaled"
        )
    if model.init_from is None and model.new_head != "auto":
        yield "model.new_head is for a network that begins with model.init_from"
    given = {
        "model.init_from": model.init_from,
        "model.frozen": model.frozen,
        "optimizer.rates": recipe.optimizer.rates,
    }
    if not recipe.mesh.replicates_only and (keys := [key for key, value in given.items() if value]):
        yield f"{enumerated(keys)}: for networks that each rank has whole, and not for mesh {recipe.mesh}"
    if recipe.batch.micro_batch == "auto" and family.normalises and not isinstance(span, int):
        yield (
            f"batch.micro_batch: auto would choose over how many images {model.name} normalises, and with them the "
            "result; --set model.batch_norm.span=N fixes their number, or --set batch.micro_batch=N"
        )


def _of_length(recipe: RecipeKeys) -> Iterator[str]:
    schedule, epochs = recipe.schedule, recipe.epochs
    run, example = f"the run (epochs: {epochs})", epochs / 2
    if schedule.warmup_epochs > epochs:
        yield (
            f"schedule.warmup_epochs ({schedule.warmup_epochs:g}) is longer than {run}; "
            "--set schedule.warmup_epochs=0 does without"
        )
    if schedule.milestones and schedule.milestones[-1] >= epochs:
        last = schedule.milestones[-1]
        yield (
            f"schedule.milestones ({last:g}) are not all within {run}; "
            f"for example --set 'schedule.milestones=[{example:g}]'"
        )
    if schedule.peak_epoch and schedule.peak_epoch >= epochs:
        yield (
            f"schedule.peak_epoch ({schedule.peak_epoch:g}) is not within {run}; "
            f"for example --set schedule.peak_epoch={example:g}"
        )

    if problem := climbs(recipe):
        yield f"{problem}; --set schedule.end_rate=0"


def climbs(recipe: RecipeKeys) -> str | None:
    """The fault of a rate that ends above its peak, if the peak is known."""
    base, size = recipe.schedule.base_batch, recipe.batch.fixed_size
    if base and not size:
        return None
    peak = recipe.optimizer.learning_rate * (size / base if base and size else 1)
    if recipe.schedule.end_rate <= peak:
        return None
    of = f"optimizer.learning_rate, scaled to batch.size {size}" if base else "optimizer.learning_rate"
    return f"schedule.end_rate ({recipe.schedule.end_rate:g}) is above {of} ({peak:g}), which should fall to it"


def _of_sync(recipe: RecipeKeys) -> Iterator[str]:
    sync = recipe.sync
    if sync is None:
        return
    alone = "sync lets each rank take steps by itself"
    if recipe.fault_tolerance.fault_tolerant:
        yield f"{alone}, and what a dead rank has learnt in them is lost; fault_tolerance.lost_rank: stop resumes"
    if recipe.communication.compression != "none" and not sync.after_epochs:
        yield f"{alone}, without gradients for communication.compression to narrow"
    if not recipe.mesh.replicates_only:
        yield f"{alone}, and no rank of mesh {recipe.mesh} has the whole model; --mesh dp_replicate=-1"
    if recipe.averaging:
        yield f"{alone}, and averaging follows parameters that are equal on all ranks after each of them"
    if recipe.precision == "fp16":
        yield f"{alone}, and precision: fp16 scales the loss by what overflowed on any rank; bf16 does not"
    if recipe.numbers.non_finite == "skip":
        yield f"{alone}, and numbers.non_finite: skip leaves a step out on all of them"
    if recipe.model.batch_norm.span == "world":
        yield f"{alone}, and model.batch_norm.span: world joins all ranks in each"
    if sync.mode == "async" and recipe.checkpoints.every_steps:
        yield "sync.mode: async joins the ranks at the end of an epoch only; leave checkpoints.every_steps out"


def _of_axes(recipe: RecipeKeys) -> Iterator[str]:
    """Axes that the model cannot be divided along, and keys about an axis that is not there."""
    name, axes, sizes = recipe.model.name, recipe.model.family.axes, recipe.mesh.sizes
    for axis, reason in _WITHOUT.items():
        if sizes[axis] != 1 and axis not in axes:
            yield (f"mesh.{axis}: {name} {reason}; --mesh {axis}=1,dp_shard=-1 divides its state instead, in PyTorch")
    if recipe.sharding.recompute and "pp" not in axes:
        yield f"sharding.recompute: {name} has no blocks to recompute; --set sharding.recompute=false"
    if sizes["dp_shard"] == 1 and recipe.sharding.zero != Sharding().zero:
        yield f"sharding.zero: {recipe.sharding.zero} is for a mesh with dp_shard; for example --mesh dp_shard=-1"
    for key, value in recipe.pipeline:
        if sizes["pp"] == 1 and value != getattr(Pipeline(), key):
            yield f"pipeline.{key}: {value} is for a mesh with pp; for example --mesh pp=2"


def _of_mesh(recipe: RecipeKeys) -> Iterator[str]:
    mesh, faults, compression = recipe.mesh, recipe.fault_tolerance, recipe.communication.compression
    if faults.fault_tolerant and not mesh.replicates_only:
        yield (
            f"fault_tolerance.lost_rank: shrink with mesh {mesh}: a lost rank takes its part of the model with it, "
            "so that the run has to resume from its checkpoint; --set fault_tolerance.lost_rank=stop does that"
        )
    if faults.fault_tolerant and mesh.dp_replicate not in (None, FILL):
        yield (
            "fault_tolerance.lost_rank: shrink changes the number of ranks, and mesh.dp_replicate fixes it; "
            "--mesh dp_replicate=-1"
        )
    if mesh.replicates_only:
        return
    whole = f"that each rank has whole, and not those of mesh {mesh}"
    if recipe.averaging:
        yield f"averaging follows parameters {whole}; leave it out"
    if compression != "none":
        yield (
            f"communication.compression: {compression} is for gradients {whole}; --set communication.compression=none"
        )


def uncompilable(recipe: RecipeKeys) -> str | None:
    """Why a recipe's network cannot be compiled; ``compile: auto`` leaves it as it is then."""
    if recipe.mesh.tp != 1:
        return (
            f"compile: {recipe.compile} with mesh {recipe.mesh}: hooks that PyTorch cannot compile divide and join "
            "what layers compute over tp; --set compile=off"
        )
    return None

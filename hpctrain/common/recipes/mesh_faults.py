"""Settings that cannot be combined with a mesh, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpctrain.common.recipes.mesh import FILL, Axis, Pipeline, Sharding

if TYPE_CHECKING:
    from hpctrain.common.recipes.schema import Recipe

MODEL_AXES: Mapping[str, tuple[Axis, ...]] = {
    "digits_cnn": (),
    "resnet18": (),
    "resnet50": (),
    "resnet101": (),
    "gpt": ("pp", "tp"),
}
"""The axes besides dp_replicate and dp_shard that each model can be divided along; with ``pp`` it has blocks."""

_WITHOUT: Mapping[Axis, str] = {
    "pp": "has no blocks to make stages of",
    "cp": "has no attention that divides sequences",
    "tp": "has no plan by which its layers are divided",
}


def mesh_fault(recipe: Recipe) -> str | None:
    """What is wrong with a recipe's mesh, sharding and pipeline, with what mends it; None for nothing."""
    return _of_model(recipe) or _without_axis(recipe) or _of_other_keys(recipe)


def _of_model(recipe: Recipe) -> str | None:
    name, sizes = recipe.model.name, recipe.mesh.sizes
    able = MODEL_AXES[name]
    for axis, why in _WITHOUT.items():
        if sizes[axis] != 1 and axis not in able:
            return f"mesh.{axis}: {name} {why}; --mesh {axis}=1,dp_shard=-1 divides its state instead, in PyTorch"
    if recipe.sharding.recompute and "pp" not in able:
        return f"sharding.recompute: {name} has no blocks to recompute; --set sharding.recompute=false"
    return None


def _without_axis(recipe: Recipe) -> str | None:
    """Keys about an axis that is not there."""
    sizes = recipe.mesh.sizes
    if sizes["dp_shard"] == 1 and recipe.sharding.zero != Sharding().zero:
        return f"sharding.zero: {recipe.sharding.zero} is for a mesh with dp_shard; for example --mesh dp_shard=-1"
    if sizes["pp"] == 1:
        for key, value in dict(recipe.pipeline).items():
            if value != getattr(Pipeline(), key):
                return f"pipeline.{key}: {value} is for a mesh with pp; for example --mesh pp=2"
    return None


def _of_other_keys(recipe: Recipe) -> str | None:
    mesh, faults = recipe.mesh, recipe.fault_tolerance
    changes = "fault_tolerance: shrink" if faults.fault_tolerant else "fault_tolerance.grow" if faults.grow else None
    if changes and not mesh.replicates_only:
        return (
            f"{changes} with mesh {mesh}: a lost rank takes its part of the model with it, so that the run has to "
            "resume from its checkpoint; --set fault_tolerance=stop does that"
        )
    if changes and mesh.dp_replicate not in (None, FILL):
        return f"{changes} changes the number of ranks, and mesh.dp_replicate fixes it; --mesh dp_replicate=-1"
    if recipe.averaging and not mesh.replicates_only:
        return f"averaging follows parameters that each rank has whole, and not those of mesh {mesh}; leave it out"
    if recipe.communication.compression != "none" and not mesh.replicates_only:
        return (
            f"communication.compression: {recipe.communication.compression} is for gradients that each rank has whole, "
            f"and not for mesh {mesh}; --set communication.compression=none"
        )
    return None

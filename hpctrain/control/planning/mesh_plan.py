"""What is known before a run about its mesh: the model, the traffic between ranks, and their variables. Pure."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.common.recipes.families import IMAGENET_CLASSES, network
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.common.recipes.mesh_traffic import MeshModel, MeshWork
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.plan import Plan, Script
from hpctrain.common.settings import MESH


def mesh_work(work: Recipe | Script, ranks: int) -> MeshWork | None:
    """The mesh of a recipe or script with its model, as far as that is known; None where all ranks only replicate.

    Raises:
        HpctrainError: the mesh does not fit the number of ranks.
    """
    mesh = work.mesh.at(ranks)
    if mesh.replicates_only:
        return None
    if isinstance(work, Script):
        return MeshWork(mesh=mesh, model=None)
    return MeshWork(mesh=mesh, model=mesh_model(work, mesh), sharding=work.sharding, pipeline=work.pipeline)


# By default glibc raises its threshold with each large buffer that is freed, and then keeps gathered parameters on its
# heap: 5 times the parameters in memory, where 1.02 times are needed (FSDP2 on 4 ranks). It stays fixed where it is set
# (https://man7.org/linux/man-pages/man3/mallopt.3.html).
SHARDING = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""The variables of CPU ranks that shard parameters."""


def mesh_lines(plan: Plan) -> list[str]:
    """The traffic of a plan's mesh; empty for ranks that only replicate, and while the hosts are not known."""
    if plan.mesh_traffic is None:
        return []
    # The network of a script is unknown, so that only neighbours can be counted.
    what = "sent in a step" if plan.mesh_traffic.in_bytes else "neighbours that send to each other"
    return [f"mesh {plan.mesh}, {what}:", *plan.mesh_traffic.lines()]


def mesh_environment(plan: Plan) -> dict[str, str]:
    """The variables that ranks get for their mesh; none where neither recipe nor script asks for one."""
    if plan.asked_mesh == Mesh():
        return {}
    found = {MESH.name: plan.mesh.option}
    on_gpus = plan.backend == "nccl" or any(place.gpu is not None for host in plan.hosts for place in host.places)
    if plan.mesh.sizes["dp_shard"] > 1 and not on_gpus:
        found |= SHARDING
    return found


def mesh_model(recipe: Recipe, mesh: Mesh) -> MeshModel:
    """The model's sizes on which a mesh's traffic depends: with bf16 and fp16, parameters and activations are sent in
    16 bits, and gradients in 32.
    """
    narrow = 4 if recipe.precision == "float32" else 2
    resolved = recipe.at_data_ranks(mesh.data_ranks)
    of_all = MeshModel(
        parameters=parameters(recipe),
        samples=resolved.global_batch / mesh.data_ranks,
        parts=resolved.batch.parts(resolved.global_batch, mesh.data_ranks),
        parameter_bytes=narrow,
        activation_bytes=narrow,
    )
    gpt = recipe.model
    if not gpt.family.predicts_tokens:
        return of_all
    return replace(of_all, layers=gpt.layers, width=gpt.width, sequence=gpt.context)


def parameters(recipe: Recipe) -> int:
    """The number of parameters of a recipe's network, with the classes of its data where they are at hand."""
    if recipe.model.family.predicts_tokens:
        return recipe.model.parameters
    size = network(recipe.model.name)
    if not size.per_class:
        return size.parameters
    # Imported here because it loads NumPy.
    from hpctrain.common.shards.folders import head_classes, manifest_at_hand

    return size.parameters + size.per_class * (head_classes(recipe, manifest_at_hand(recipe)) - IMAGENET_CLASSES)

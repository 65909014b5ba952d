"""``hpctrain predict --write``: the layout of a prediction, as a recipe or as the lines of a script."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.checked_yaml import dump
from hpctrain.common.recipes.compatibility import used_values
from hpctrain.common.recipes.load import override_recipe
from hpctrain.common.recipes.mesh import AXES
from hpctrain.control.predict.prediction import Row
from hpctrain.control.predict.training import Training
from hpctrain.control.predict.transformers.prediction import LanguageTraining

_SCRIPT = """\
# {ranks} ranks; each of {data_ranks} data-parallel ones computes {micro_batches} x {micro_batch} samples in a step.
# {notes}
{differences}import hpctrain as ht
import torch

comm = ht.init()
plan = ht.ParallelPlan(shard=[Block], zero={zero}{tensor}{recompute}{precision})
{distribute}
loader = ht.shard(loader)
"""
_DISTRIBUTE = "model, optimizer = ht.distribute(model, optimizer, mesh=ht.mesh({mesh}), plan=plan)"
_PIPELINE = (
    "pipeline = ht.Pipeline(model, optimizer, loss_of, mesh=ht.mesh({mesh}), plan=plan, "
    'schedule="{schedule}", micro_batches={micro_batches})'
)


def require_written(file: Path, asked: Training | LanguageTraining) -> None:
    """Refuse a file that cannot hold what is predicted.

    Raises:
        HpctrainError: the training is no transformer's, or the file's kind is not one for it.
    """
    recipe = asked.recipe if isinstance(asked, LanguageTraining) else None
    kinds = [".py"] * isinstance(asked, LanguageTraining) + [".yaml"] * (recipe is not None)
    if file.suffix not in kinds:
        raise HpctrainError(
            "HT-format-unknown",
            "--write {file}: the layout of {work} is not written there",
            f"valid: a file that ends in {' or '.join(kinds)}" if kinds else "only transformers have a layout",
            file=file,
            work=asked.name,
        )


def written(asked: Training | LanguageTraining, row: Row, file: Path) -> bytes:
    """The content of the file.

    Args:
        row: the prediction whose layout it is.
    """
    assert isinstance(asked, LanguageTraining) and row.layout is not None
    if file.suffix == ".py":
        return _script(row.layout, row.gpus).encode()
    assert asked.recipe is not None
    changed = override_recipe(asked.recipe, recipe_overrides(row.layout))
    return dump(used_values(changed)).encode()


def recipe_overrides(layout: Mapping[str, Any]) -> list[str]:
    """The values of a recipe that a layout stands for."""
    found = [f"mesh.{axis}={layout[axis]}" for axis in AXES if axis != "cp"]
    # A pipeline cuts what a rank computes at once into its micro-batches.
    parts = layout["micro_batches"] if layout["pp"] > 1 else 1
    found += [
        f"batch.size={layout['global_batch']}",
        "batch.per_rank=null",
        "batch.emulated_ranks=null",
        f"batch.micro_batch={layout['micro_batch'] * parts}",
    ]
    if layout["pp"] > 1:
        found += [f"pipeline.schedule={layout['schedule']}", f"pipeline.micro_batches={parts}"]
    # Without dp_shard, the default alone is valid.
    found += [f"sharding.zero={_zero(layout) if layout['dp_shard'] > 1 else 3}"]
    return [*found, f"sharding.recompute={str(layout['recomputation'] == 'full').lower()}"]


def script_differences(layout: Mapping[str, Any]) -> list[str]:
    """What the lines of a script do in another way than a layout that was predicted."""
    found = []
    if layout.get("virtual_stages", 1) > 2:
        found.append(f"virtual_stages: {layout['virtual_stages']} were predicted, and ht.Pipeline gives each rank 2")
    if layout["recomputation"] not in ("none", "full"):
        found.append(f"recomputation: {layout['recomputation']} was predicted, and recompute= does it in full")
    if layout["dp_shard"] * layout["cp"] > 1 and (predicted := _zero(layout)) != (zero := _script_zero(layout)):
        found.append(f"zero: {predicted} was predicted, and plans that divide or narrow the model have {zero} at least")
    if layout["precision"] in ("fp8", "fp4"):
        found.append(f"precision: {layout['precision']} was predicted, and plans have bfloat16")
    return found


def _script_zero(layout: Mapping[str, Any]) -> int:
    return _zero(layout, divided=layout["tp"] * layout["pp"] > 1 or layout["precision"] != "float32")


def _zero(layout: Mapping[str, Any], *, divided: bool = False) -> int:
    """Of a plan: parameters that stay gathered from the forward to the backward pass are its stage 2.

    Args:
        divided: whether the plan divides the model otherwise too, with which stage 1 does not go together.
    """
    kept = layout["zero"] == 3 and not layout["reshard"] and layout["pp"] == 1
    return 2 if kept or (divided and layout["zero"] < 2) else max(1, int(layout["zero"]))


def _script(layout: Mapping[str, Any], ranks: int) -> str:
    narrow = layout["precision"]
    notes = ["Block is the class of a layer"]
    if layout["tp"] > 1:
        notes.append("TENSOR says how its matrices are divided along tp")
    if layout["cp"] > 1:
        notes.append("attention along cp is the script's own")
    mesh = ", ".join(f"{axis}={layout[axis]}" for axis in AXES if layout[axis] > 1) or "dp_shard=1"
    lines = _PIPELINE if layout["pp"] > 1 else _DISTRIBUTE
    return _SCRIPT.format(
        notes="; ".join(notes) + ".",
        differences="".join(f"# Not as predicted: {each}.\n" for each in script_differences(layout)),
        ranks=ranks,
        distribute=lines.format(**{**layout, "schedule": layout.get("schedule"), "mesh": mesh}),
        data_ranks=layout["dp_replicate"] * layout["dp_shard"],
        micro_batch=layout["micro_batch"],
        micro_batches=layout["micro_batches"],
        zero=_script_zero(layout),
        tensor=", tensor=TENSOR" if layout["tp"] > 1 else "",
        recompute="" if layout["recomputation"] == "none" else ", recompute=[Block]",
        precision="" if narrow == "float32" else f", precision=torch.{'float16' if narrow == 'fp16' else 'bfloat16'}",
    )

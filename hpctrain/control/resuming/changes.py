"""Finds settings that changed since a run's checkpoint, and refuses those with which it cannot be resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.common.checkpoints.layout import checkpoint_path
from hpctrain.common.checkpoints.manifest import read_manifest
from hpctrain.common.errors import HpctrainError, joined
from hpctrain.common.recipes.difference import flat, settings
from hpctrain.common.recipes.gpt import GptSettings
from hpctrain.common.recipes.requirements import has_folder, shard_folder
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.resuming import resume_command

# Settings that fix the shape of a checkpoint's state, or the data that it is part of the way through.
_HELD = (
    "model.name",
    "model.classes",
    "model.frozen",
    *(f"model.{key}" for key in GptSettings.model_fields),
    "optimizer.name",
    "data.name",
    "data.limit",
    "data.epoch_samples",
    "data.test_fraction",
    "data.split_seed",
)


def changes_since(directory: RunDirectory, iteration: int, plan: Plan) -> dict[str, tuple[Any, Any]]:
    """The values of a recipe that differ from an iteration's checkpoint: old and new, by dotted key."""
    saved = read_manifest(checkpoint_path(directory.checkpoints, iteration)).plan.get("recipe")
    if plan.recipe is None or not saved:
        return {}
    now = settings(plan.recipe)
    return {key: (old, now[key]) for key, old in flat(saved) if key in now and now[key] != old}


def revert_command(directory: RunDirectory, changes: Mapping[str, tuple[Any, Any]]) -> str:
    """The command that resumes with the values of the checkpoint."""
    texts = (f"{key}={old if isinstance(old, str) else json.dumps(old)}" for key, (old, _) in changes.items())
    words = [word for text in texts for word in ("--set", text)]
    return resume_command(directory, "--accept-changes", *words)


def require_fit(directory: RunDirectory, iteration: int, plan: Plan, asked: Mapping[str, Any]) -> None:
    """Refuse a recipe that cannot be resumed from an iteration's checkpoint, even if the changes are accepted.

    Args:
        asked: the keys that this resume changes, to tell the user to leave them out.
    """
    if plan.recipe is None:
        return
    path = checkpoint_path(directory.checkpoints, iteration)
    changes = changes_since(directory, iteration, plan)
    fixed = set(_fixed_keys(path, changes, plan, plan.recipe))
    unfit = {key: values for key, values in changes.items() if key in fixed}
    if unfit:
        leave = "leave that out, or start anew with another --run-dir"
        hint = leave if asked.keys() & unfit.keys() else revert_command(directory, unfit)
        faults = [
            HpctrainError(
                "HT-checkpoint-of-other-value",
                "{path} is of {key}={old}, and a run with {key}={new} cannot resume from it",
                path=path,
                key=key,
                old=old,
                new=new,
            )
            for key, (old, new) in unfit.items()
        ]
        raise joined(faults, hint)


def _fixed_keys(path: Path, changes: Mapping[str, tuple[Any, Any]], plan: Plan, recipe: Recipe) -> Iterator[str]:
    """The keys whose values must be those of the checkpoint, changed or not."""
    yield from _HELD
    if "fp16" in changes.get("precision", ()):
        # The loss scale of fp16 is part of the state.
        yield "precision"
    if recipe.data.name == "digits" and recipe.data.split_seed is None:
        yield "seed"
    progress = read_manifest(path).progress
    if recipe.epochs < progress.epoch:
        yield "epochs"
    # Data in object storage is compared by the ranks, because a login node may not reach it.
    if "data.path" in changes and not plan.start.container and has_folder(recipe):
        # Imported here because it loads NumPy.
        from hpctrain.common.shards.folders import training_fingerprint

        # The same samples may have moved to another folder.
        if training_fingerprint(shard_folder(recipe), recipe.data.name) != progress.samples:
            yield "data.path"

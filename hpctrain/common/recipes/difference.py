"""Recipes as dotted keys, and where two of them differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from hpctrain.common.recipes.schema import Recipe

# Keys that describe a recipe or report on a run, and do not change the training.
_ABOUT = {"name", "source", "cost", "reported", "notes", "tracking", "copied"}


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a nested mapping, by dotted key."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def settings(work: BaseModel) -> dict[str, Any]:
    """The values of a recipe or script that decide what it does, by dotted key, as JSON has them."""
    return dict(flat(work.model_dump(mode="json", exclude=_ABOUT)))


def differences(one: BaseModel, other: BaseModel) -> dict[str, tuple[Any, Any]]:
    """The values that differ between two recipes or scripts, by dotted key; None for a key that one lacks."""
    first, second = settings(one), settings(other)
    keys = dict.fromkeys([*first, *second])
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}


# Values that no source's result depends on; for another batch a source has other rows.
_INDIFFERENT = (
    "batch.size",
    "batch.emulated_ranks",
    "checkpoints",
    "communication.bucket_mb",
    "compile",
    "data.broken_images",
    "data.decode",
    "data.path",
    "data.workers",
    "fault_tolerance",
    "guard",
    "mesh",
    "numbers",
    "pipeline",
    "seed",
    "sharding",
    "smoke",
)


def deciding_differences(one: Recipe, other: Recipe) -> list[str]:
    """The keys whose difference means that a result of one recipe is not a result of the other."""
    indifferent = list(_INDIFFERENT)
    if not one.model.family.normalises or one.model.batch_norm.span is not None:
        # With batch normalisation over a rank's samples, their number changes the statistics.
        indifferent += ["batch.per_rank", "batch.micro_batch"]
    keys = differences(one, other)
    return [key for key in keys if not any(f"{key}.".startswith(f"{prefix}.") for prefix in indifferent)]

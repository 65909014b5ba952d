"""What a recipe's shards of images hold, where they are at hand: their classes decide how large its network is."""

from __future__ import annotations

import os

from hpctrain.common.recipes.requirements import has_folder, shard_folder
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.shards.manifest import MANIFEST, ShardManifest, read_manifest

IMAGENET_CLASSES = 1000
"""The classes that are assumed where neither a recipe nor its data say how many there are."""


def manifest_at_hand(recipe: Recipe) -> ShardManifest | None:
    """The manifest of a recipe's images; None where its data are others, or not in this place.

    Raises:
        HpctrainError: the manifest is there, and damaged.
    """
    if recipe.data.name != "imagenet" or not recipe.data.path or not has_folder(recipe):
        return None
    folder = shard_folder(recipe)
    return read_manifest(folder) if os.path.exists(folder / MANIFEST) else None  # noqa: PTH110 - of over-long names


def head_classes(recipe: Recipe, manifest: ShardManifest | None) -> int:
    """The outputs of the last layer of a recipe's network of images, as far as this is known here.

    Args:
        manifest: see :func:`manifest_at_hand`.
    """
    if recipe.model.classes is not None:
        return recipe.model.classes
    return IMAGENET_CLASSES if manifest is None else len(manifest.classes)

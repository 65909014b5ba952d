"""Folders of shards, of photographs or of tokens: what they hold, and whether they are as they were written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hpctrain.common.recipes.families import IMAGENET_CLASSES
from hpctrain.common.recipes.requirements import shard_folder
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.shards.manifest import (
    MANIFEST,
    SETTINGS,
    ShardManifest,
    StoredFile,
    read_manifest,
    remake,
)
from hpctrain.common.shards.text import token_manifest as text

# Hashing runs beside other threads; more of them than this help no disk.
_MOST_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class VerifiedFolder:
    """A folder compared with its manifest.

    Attributes:
        shards: how many the manifest lists.
        holds: a sentence part that says what is in them.
        faults: by the names of files that are not as they were written.
        remedy: the command that makes the faulty files again.
    """

    shards: int
    holds: str
    faults: dict[str, str]
    remedy: str


def training_fingerprint(folder: Path, data: str) -> str:
    """A text that differs for other training samples.

    Args:
        folder: what ``hpctrain data shard`` or ``hpctrain data prepare-text`` wrote.
        data: the recipe's data, ``imagenet`` or ``text``.

    Raises:
        HpctrainError: the folder is no whole one of that kind.
    """
    if data == "text":
        return text.read_text_manifest(folder).train.fingerprint
    return read_manifest(folder).splits["train"].index_sha256


def manifest_at_hand(recipe: Recipe) -> ShardManifest | None:
    """The manifest of a recipe's images; None where its data are others, or not in this place.

    Raises:
        HpctrainError: the manifest is there, and damaged.
    """
    if recipe.data.name != "imagenet" or not recipe.data.path:
        return None
    folder = shard_folder(recipe)
    return read_manifest(folder) if os.path.exists(folder / MANIFEST) else None  # noqa: PTH110 - of over-long names


def head_classes(recipe: Recipe, manifest: ShardManifest | None) -> int:
    """The outputs of the last layer of a recipe's network of images, as far as the manifest of its images tells."""
    return recipe.model.classes or (len(manifest.classes) if manifest else IMAGENET_CLASSES)


def holds_text(folder: Path) -> bool:
    """Whether a folder is one of tokens."""
    return (folder / text.SETTINGS).exists()


def verify_folder(folder: Path) -> VerifiedFolder:
    """Compare sizes and hashes.

    Raises:
        HpctrainError: there is no manifest, or it is damaged.
    """
    files: Sequence[StoredFile]
    if holds_text(folder):
        tokens = text.read_text_manifest(folder)
        files, shards = tokens.files, len(tokens.files)
        holds = f"{tokens.train.tokens} tokens in train, {tokens.val.tokens} tokens in val"
        remedy = text.command(tokens.settings, folder)
    else:
        from hpctrain.common.shards.make import command

        images = read_manifest(folder)
        files, shards = images.files, sum(len(split.shards) for split in images.splits.values())
        holds = ", ".join(f"{split.samples} images in {name}" for name, split in images.splits.items())
        if smaller := images.settings.shrinking:
            holds += f", shrunk to a short side of {smaller.short_side} pixels"
        remedy = command(images.settings, folder) if (folder / SETTINGS).exists() else remake(folder)
    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        compared = zip(files, pool.map(lambda file: file.fault(folder), files), strict=True)
        faults = {file.name: fault for file, fault in compared if fault}
    return VerifiedFolder(shards=shards, holds=holds, faults=faults, remedy=remedy)

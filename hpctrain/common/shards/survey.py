"""Looks at data of one's own, to write a recipe for it: counts classes and images, and reads some images' sizes."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.common.extras import require
from hpctrain.common.files.disk import reading
from hpctrain.common.files.regular import read_regular
from hpctrain.common.recipes.own import OwnImages, OwnText
from hpctrain.common.shards.decoding import MOST_BYTES, BrokenImageError, look
from hpctrain.common.shards.folders import holds_text
from hpctrain.common.shards.image_shards import Shards
from hpctrain.common.shards.image_sources import SPLITS, find_source, split_folders
from hpctrain.common.shards.listing import ClassFolder, ImageFile
from hpctrain.common.shards.make import divided, list_images
from hpctrain.common.shards.manifest import MANIFEST, read_manifest, wrong_source
from hpctrain.common.shards.text.token_manifest import read_text_manifest

# The sizes of so many training images are read, spread evenly over all.
_MOST_LOOKED_AT = 64


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a folder holds.

    Attributes:
        made: whether it is what training reads; else ``hpctrain data shard`` makes shards of it first.
        whole: whether it is one folder of classes, which is still to be divided.
    """

    data: OwnImages | OwnText
    made: bool = False
    whole: bool = False


def survey(folder: Path, share: float) -> Survey:
    """Look at class folders, shards or tokens.

    Args:
        share: of the images of one folder of classes, those that validate.

    Raises:
        HpctrainError: the folder is none of these, holds fewer than two classes, or something that is no image.
    """
    if os.path.exists(folder / MANIFEST):  # noqa: PTH110 - Path.exists raises for over-long names
        if holds_text(folder):
            text = read_text_manifest(folder)
            vocabulary = text.settings.tokenizer.vocabulary
            return Survey(data=OwnText(vocabulary=vocabulary, train=text.train.tokens, val=text.val.tokens), made=True)
        manifest = read_manifest(folder)
        _require_classes(folder, manifest.classes)
        require("train", "imagenet")
        counts = {split: manifest.splits[split].samples for split in SPLITS}
        shards = Shards(folder, "train")
        rows = range(0, len(shards), -(-len(shards) // _MOST_LOOKED_AT))
        side = _median(folder, _sides(shards.read(row) for row in rows))
        return Survey(data=OwnImages(classes=len(manifest.classes), side=side, **counts), made=True)
    require("train", "imagenet")
    whole = not split_folders(folder)
    source = find_source(folder, divided=not whole)
    if not all(isinstance(part, ClassFolder) for parts in source.parts.values() for part in parts):
        hint = "hpctrain data shard makes shards of them: name their folder"
        raise wrong_source(folder, "holds Parquet files or shards of other programs", hint)
    _require_classes(folder, source.classes)
    listed = {split: list_images(folder, split, parts, map) for split, parts in source.parts.items()}
    if whole:
        listed = dict(divided(folder, source.classes, listed["train"], share))
    images = {split: [image for part in parts for image in part] for split, parts in listed.items()}
    tried = images["train"][:: -(-len(images["train"]) // _MOST_LOOKED_AT)]
    side = _median(folder, _sides(_contents(tried)))
    counts = {split: len(images[split]) for split in SPLITS}
    return Survey(data=OwnImages(classes=len(source.classes), side=side, **counts), whole=whole)


def _require_classes(folder: Path, classes: Sequence[str]) -> None:
    if len(classes) < 2:
        problem = f"has one class, {classes[0] if classes else 'none'}: there is nothing to tell apart"
        hint = "name a folder with a folder for each class, or with train/CLASS/ and val/CLASS/"
        raise wrong_source(folder, problem, hint)


def _contents(images: Sequence[ImageFile]) -> Iterator[bytes]:
    for image in images:
        with reading(image.file, "make it readable"):
            yield read_regular(Path(image.file), MOST_BYTES)


def _sides(contents: Iterator[bytes]) -> list[int]:
    """The shorter sides of the images that can be decoded."""
    sides = []
    for content in contents:
        with contextlib.suppress(BrokenImageError):
            header = look(content)
            sides.append(min(header.width, header.height))
    return sides


def _median(folder: Path, sides: Sequence[int]) -> int:
    if not sides:
        hint = "hpctrain data verify, or a viewer of images, says more about them"
        raise wrong_source(folder, "none of the images that were tried can be decoded", hint)
    return int(statistics.median(sides))

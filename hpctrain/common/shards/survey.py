"""Looks at data of one's own, to write a recipe for it: counts classes and images, and reads some images' sizes."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import require
from hpctrain.common.files.disk import reading
from hpctrain.common.files.regular import read_regular
from hpctrain.common.recipes.own import OwnImages, OwnText
from hpctrain.common.shards.archives import find_source
from hpctrain.common.shards.decoding import MOST_BYTES, BrokenImageError, look
from hpctrain.common.shards.folders import holds_text
from hpctrain.common.shards.listing import ClassFolder, ImageFile
from hpctrain.common.shards.make import divided, list_images
from hpctrain.common.shards.manifest import MANIFEST, read_manifest
from hpctrain.common.shards.read import Shards
from hpctrain.common.shards.splits import SPLITS, split_folders
from hpctrain.common.shards.text.manifest import read_text_manifest

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
        side = _median(folder, _sides_of_shards(folder))
        return Survey(data=OwnImages(classes=len(manifest.classes), side=side, **counts), made=True)
    require("train", "imagenet")
    whole = not split_folders(folder)
    source = find_source(folder, divided=not whole)
    if not all(isinstance(part, ClassFolder) for parts in source.parts.values() for part in parts):
        raise HpctrainError(
            "HT-recipe-data-not-shards",
            "{folder} holds archives or Parquet files",
            "hpctrain data shard makes shards of them: name their folder",
            folder=folder,
        )
    _require_classes(folder, source.classes)
    listed = {split: list_images(folder, split, parts, map) for split, parts in source.parts.items()}
    if whole:
        listed = dict(divided(folder, source.classes, listed["train"], share))
    images = {split: [image for part in parts for image in part] for split, parts in listed.items()}
    side = _median(folder, _sides_of_files(_spread(images["train"])))
    counts = {split: len(images[split]) for split in SPLITS}
    return Survey(data=OwnImages(classes=len(source.classes), side=side, **counts), whole=whole)


def _require_classes(folder: Path, classes: Sequence[str]) -> None:
    if len(classes) < 2:
        raise HpctrainError(
            "HT-recipe-data-one-class",
            "{folder} has one class, {name}: there is nothing to tell apart",
            "name a folder with a folder for each class, or with train/CLASS/ and val/CLASS/",
            folder=folder,
            name=classes[0] if classes else "none",
        )


def _spread(images: Sequence[ImageFile]) -> list[ImageFile]:
    step = -(-len(images) // _MOST_LOOKED_AT)
    return list(images[::step])


def _sides_of_files(images: Sequence[ImageFile]) -> list[int]:
    """The shorter sides of the images that can be decoded."""

    def contents() -> Iterator[bytes]:
        for image in images:
            with reading(image.file, "make it readable"):
                yield read_regular(Path(image.file), MOST_BYTES)

    return _sides(contents())


def _sides_of_shards(folder: Path) -> list[int]:
    shards = Shards(folder, "train")
    return _sides(shards.read(index) for index in range(0, len(shards), -(-len(shards) // _MOST_LOOKED_AT)))


def _sides(contents: Iterator[bytes]) -> list[int]:
    found = []
    for content in contents:
        try:
            header = look(content)
        except BrokenImageError:
            continue
        found.append(min(header.width, header.height))
    return found


def _median(folder: Path, sides: Sequence[int]) -> int:
    if not sides:
        raise HpctrainError(
            "HT-recipe-data-all-broken",
            "none of the images of {folder} that were tried can be decoded",
            "hpctrain data verify, or a viewer of images, says more about them",
            folder=folder,
        )
    return int(statistics.median(sides))

"""The manifest of a folder of shards.

::

    DIR/sharding.json       what it is made of; staged copies lack it
    DIR/origin.json         in a cache alone: the URL that its files are fetched from, see hpctrain.common.shards.cache
    DIR/manifest.json       written last, so that a folder without it is not whole
    DIR/SPLIT-index.npy     a row a sample, in the order of the shards: where its image is
    DIR/SPLIT-000000.tar    KEY.cls (the label as text) and KEY.jpg of each sample, as WebDataset reads them
    DIR/records/            of each shard that is done, for ``hpctrain data shard`` to go on from
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, Protocol

import numpy as np
from pydantic import FailFast, Field, ValidationError, model_validator

from hpctrain.common.errors import HpctrainError, InvalidValueError
from hpctrain.common.files.disk import read_error
from hpctrain.common.files.printable import shell_word
from hpctrain.common.files.regular import read_regular
from hpctrain.common.frozen import FrozenModel
from hpctrain.common.run.directory import model_error

MANIFEST = "manifest.json"
# The settings of the folder, written when its making begins; a staged copy has none.
SETTINGS = "sharding.json"
# The limit for a manifest: a shard takes about 150 bytes, so 100,000 shards fit.
MOST_MANIFEST_BYTES = 1 << 24
# In a cache, the file that names the URL.
ORIGIN = "origin.json"
# offset: of the image's first byte in the shard. key: in UTF-8, as in the shard, for messages.
INDEX_ROW = np.dtype([("shard", "<u4"), ("offset", "<i8"), ("size", "<u4"), ("label", "<i4"), ("key", "S48")])


SplitName = Literal["train", "val"]
# A name is joined to a folder's path, so that it must not lead out of it.
ShardName = Annotated[str, Field(pattern=r"^(train|val)-[0-9]{6,}\.tar$")]
Count = Annotated[int, Field(ge=0)]
Some = Annotated[int, Field(ge=1)]


class WrittenFile(Protocol):
    """A file as a manifest has it; ``bytes`` is its size."""

    @property
    def name(self) -> str: ...

    @property
    def bytes(self) -> int: ...

    @property
    def sha256(self) -> str: ...


class ShardFile(FrozenModel):
    """One tar file; ``bytes`` is its size."""

    name: ShardName
    samples: Some
    bytes: Count
    sha256: str


class Split(FrozenModel):
    """Training or validation; ``bytes`` is the size of all its shards."""

    samples: Some
    bytes: Count
    index_sha256: str
    shards: Annotated[tuple[ShardFile, ...], FailFast()]

    @model_validator(mode="after")
    def _consistent(self) -> Split:
        if len({shard.name for shard in self.shards}) < len(self.shards):
            raise InvalidValueError("HT-shards-name-twice", "two shards have one name")
        if sum(shard.samples for shard in self.shards) != self.samples:
            raise InvalidValueError("HT-shards-samples-not-sum", "samples is not the sum of the shards'")
        return self


class BrokenImage(FrozenModel):
    """An image that cannot be decoded; it is in the shards nevertheless."""

    split: str
    key: str
    message: str


class Shrinking(FrozenModel):
    """How photographs are made smaller before they go into shards; see
    :func:`hpctrain.common.shards.decoding.shrunk`.
    """

    short_side: int = Field(ge=1)
    quality: int = Field(ge=1, le=100)


class ShardSettings(FrozenModel):
    """The settings that determine the bytes of shards.

    ``listing`` is the SHA-256 of all keys, sizes and labels of the source; the columns are those of Parquet files.
    """

    source: str
    listing: str
    seed: int
    shard_bytes: int | None
    shard_samples: int | None
    image_column: str = "image"
    label_column: str = "label"
    shrinking: Shrinking | None = None
    validation_share: float | None = None


class ShardManifest(FrozenModel):
    """``manifest.json``. The label of a class is its index in ``classes``, the sorted WordNet identifiers."""

    format: int = Field(1, ge=1, le=1)
    classes: Annotated[tuple[str, ...], FailFast()]
    splits: dict[SplitName, Split]
    broken: Annotated[tuple[BrokenImage, ...], FailFast()]
    settings: ShardSettings

    @model_validator(mode="after")
    def _whole(self) -> ShardManifest:
        missing = {"train", "val"} - set(self.splits)
        if missing:
            raise InvalidValueError("HT-shards-no-split", "there is no split {split}", split=missing.pop())
        return self


def read_manifest(folder: Path) -> ShardManifest:
    """The manifest of a folder of shards.

    Raises:
        HpctrainError: the folder is no folder of shards, is not whole, or its manifest is damaged.
    """
    path = folder / MANIFEST
    try:
        content = read_regular(path, MOST_MANIFEST_BYTES)
    except FileNotFoundError as error:
        what = "is not there" if not folder.exists() else f"holds no complete set of shards: there is no {path}"
        hint = f"hpctrain data shard SOURCE {shell_word(folder)} makes it, or continues where it stopped"
        # A folder that may not be listed has nothing here.
        _, folders, files = next(os.walk(folder), ("", [], []))
        foreign = any(name.endswith((".tar", ".parquet")) for name in files) and "train-index.npy" not in files
        if (folders or foreign) and SETTINGS not in files:
            made = f"hpctrain data shard {shell_word(folder)} SHARDS"
            hint = f"if it holds images, {made} makes shards of them, with --validation-share 0.2 if it has no val/"
        raise HpctrainError(
            "HT-shards-not-there",
            "{folder} {problem}",
            hint,
            folder=folder,
            problem=what,
        ) from error
    except OSError as error:
        raise read_error(error, path, "name a folder of shards") from error
    return parse_manifest(content, str(path), f"{remake(folder)} writes it again")


def parse_manifest(content: bytes, where: str, hint: str) -> ShardManifest:
    """A manifest from the bytes of its file.

    Raises:
        HpctrainError: it is damaged; with ``where`` before each fault, and ``hint``.
    """
    try:
        return ShardManifest.model_validate_json(content)
    except ValidationError as error:
        raise model_error(error, where, hint) from error


def remake(folder: Path) -> str:
    """The command that remakes damaged or missing files of a folder."""
    if (folder / MANIFEST).exists() and not (folder / SETTINGS).exists():
        source = "URL" if (folder / ORIGIN).exists() else "DIR"
        return f"hpctrain data stage {source} {shell_word(folder)} --check"
    return f"hpctrain data shard SOURCE {shell_word(folder)}"

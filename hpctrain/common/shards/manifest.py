"""The manifest of a folder of shards.

::

    DIR/sharding.json       what it is made of; staged copies lack it
    DIR/manifest.json       written last, so that a folder without it is not whole
    DIR/SPLIT-index.npy     a row a sample, in the order of the shards: where its image is
    DIR/SPLIT-000000.tar    KEY.cls (the label as text) and KEY.jpg of each sample, as WebDataset reads them
    DIR/records/            of each shard that is done, for ``hpctrain data shard`` to go on from
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import AfterValidator, FailFast, Field, ValidationError, model_validator

from hpctrain.common.errors import HpctrainError, InvalidValueError
from hpctrain.common.files.disk import read_error
from hpctrain.common.files.printable import shell_word
from hpctrain.common.files.regular import read_regular, sha256
from hpctrain.common.frozen import FrozenModel
from hpctrain.common.run.directory import model_error

MANIFEST = "manifest.json"
# The settings of the folder, written when its making begins; a staged copy has none.
SETTINGS = "sharding.json"
# The limit for a manifest: a shard takes about 150 bytes, so 100,000 shards fit.
MOST_MANIFEST_BYTES = 1 << 24
# offset: of the image's first byte in the shard. key: in UTF-8, as in the shard, for messages.
INDEX_ROW = np.dtype([("shard", "<u4"), ("offset", "<i8"), ("size", "<u4"), ("label", "<i4"), ("key", "S48")])


SplitName = Literal["train", "val"]
# A name is joined to a folder's path, so that it must not lead out of it.
ShardName = Annotated[str, Field(pattern=r"^(train|val)-[0-9]{6,}\.tar$")]
Count = Annotated[int, Field(ge=0)]
Some = Annotated[int, Field(ge=1)]


# Absolute, since the work goes to processes with another current directory.
AbsolutePath = Annotated[Path, AfterValidator(Path.absolute)]
Manifest = TypeVar("Manifest", bound=FrozenModel)


class StoredFile(NamedTuple):
    """A file of a folder of shards, as its manifest has it, which does not note the size of an index."""

    name: str
    sha256: str
    size: int | None

    def fault(self, folder: Path, *, hashed: bool = True) -> str | None:
        """How the file in a folder differs from what was written, by its hash or its size alone, or why it cannot be
        read; None if it is as it was written.
        """
        try:
            size = (folder / self.name).stat().st_size
            if self.size is not None and size != self.size:
                return f"{'too long' if size > self.size else 'cut short'}: {size} bytes of {self.size}"
            if hashed and sha256(folder / self.name) != self.sha256:
                return "changed: its SHA-256 is not the one it was written with"
        except OSError as error:
            return error.strerror or str(error)
        return None


class ShardFile(FrozenModel):
    """One tar file; ``bytes`` is its size."""

    name: ShardName
    samples: Some
    bytes: Count
    sha256: str

    @property
    def stored(self) -> StoredFile:
        """The file, as it is compared and copied."""
        return StoredFile(self.name, self.sha256, self.bytes)


class Split(FrozenModel):
    """Training or validation; ``bytes`` is the size of all its shards."""

    samples: Some
    bytes: Count
    index_sha256: str
    shards: Annotated[tuple[ShardFile, ...], FailFast()]

    @model_validator(mode="after")
    def _consistent(self) -> Split:
        if len({shard.name for shard in self.shards}) < len(self.shards):
            raise InvalidValueError("HT-shards-inconsistent", "{problem}", problem="two shards have one name")
        if sum(shard.samples for shard in self.shards) != self.samples:
            problem = "samples is not the sum of the shards'"
            raise InvalidValueError("HT-shards-inconsistent", "{problem}", problem=problem)
        return self

    def index(self, name: str) -> StoredFile:
        """The file of the split's index."""
        return StoredFile(index_name(name), self.index_sha256, None)


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


class ShardOptions(FrozenModel):
    """How shards are made; exactly one of ``shard_bytes`` and ``shard_samples`` is set, and the columns are those of
    Parquet files.
    """

    seed: int = Field(0, ge=0)
    shard_bytes: int | None = Field(None, ge=1)
    shard_samples: int | None = Field(None, ge=1)
    image_column: str = "image"
    label_column: str = "label"
    shrinking: Shrinking | None = None
    validation_share: float | None = Field(None, gt=0, lt=1)


class ShardSettings(ShardOptions):
    """What determines the bytes of shards; ``listing`` is the SHA-256 of all keys, sizes and labels of the source."""

    source: str
    listing: str


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
            raise InvalidValueError("HT-shards-inconsistent", "{problem}", problem=f"there is no split {missing.pop()}")
        return self

    @property
    def files(self) -> list[StoredFile]:
        """The shards and the indices."""
        shards = [shard.stored for split in self.splits.values() for shard in split.shards]
        return [*shards, *(split.index(name) for name, split in self.splits.items())]


def index_name(split: str) -> str:
    """The name of the file of a split's index."""
    return f"{split}-index.npy"


def read_manifest(folder: Path) -> ShardManifest:
    """The manifest of a folder of shards; its errors are those of :func:`read_as`."""
    return read_as(ShardManifest, folder, partial(_making, folder), f"{remake(folder)} writes it again")


def _making(folder: Path) -> str:
    """The hint for a folder that holds no complete set of shards."""
    # A folder that may not be listed has nothing here.
    _, folders, files = next(os.walk(folder), ("", [], []))
    tables = any(name.endswith(".parquet") for name in files)
    if (folders or tables) and SETTINGS not in files:
        made = f"hpctrain data shard {shell_word(folder)} SHARDS"
        return f"if it holds images, {made} makes shards of them, with --validation-share 0.2 if it has no val/"
    return f"hpctrain data shard SOURCE {shell_word(folder)} makes it, or continues where it stopped"


def read_as(model: type[Manifest], folder: Path, missing: Callable[[], str], again: str) -> Manifest:
    """The manifest of a folder of images or of tokens.

    Args:
        missing: gives the hint where there is none.
        again: the hint where it is damaged.

    Raises:
        HpctrainError: the folder is no such folder, is not whole, or its manifest is damaged.
    """
    path = folder / MANIFEST
    try:
        return model.model_validate_json(read_regular(path, MOST_MANIFEST_BYTES))
    except FileNotFoundError as error:
        problem = f"holds no complete set of shards: there is no {path}" if folder.exists() else "is not there"
        raise HpctrainError(
            "HT-shards-not-there", "{folder} {problem}", missing(), folder=folder, problem=problem
        ) from error
    except OSError as error:
        raise read_error(error, path, "name a folder of shards or of tokens") from error
    except ValidationError as error:
        raise model_error(error, path, again) from error


def wrong_source(path: Path | str, problem: str, hint: str) -> HpctrainError:
    """The error for images, tables or texts that shards cannot be made of."""
    return HpctrainError("HT-source-wrong", "{path}: {problem}", hint, path=path, problem=problem)


def damaged(path: Path, problem: str, again: str | None = None, *, exit_code: int = 2) -> HpctrainError:
    """The error for a file that is not as it was written.

    Args:
        again: the command that makes it again; by default that for a folder of images.
    """
    hint = f"hpctrain data verify {shell_word(path.parent)} finds all that is damaged; {again or remake(path.parent)} "
    return HpctrainError(
        "HT-shard-damaged",
        "{path}: {problem}",
        f"{hint}makes it again",
        exit_code=exit_code,
        path=path,
        problem=problem,
    )


def require_sizes(folder: Path, files: Iterable[StoredFile], again: str | None = None) -> None:
    """Compare the sizes of files with the manifest.

    Args:
        again: see :func:`damaged`.

    Raises:
        HpctrainError: one is not there, or not whole.
    """
    for file in files:
        if fault := file.fault(folder, hashed=False):
            raise damaged(folder / file.name, fault, again)


def remake(folder: Path) -> str:
    """The command that remakes damaged or missing files of a folder."""
    if (folder / MANIFEST).exists() and not (folder / SETTINGS).exists():
        return f"hpctrain data stage DIR {shell_word(folder)} --check"
    return f"hpctrain data shard SOURCE {shell_word(folder)}"


def data_command(verb: str, *words: object, **options: object) -> str:
    """The command ``hpctrain data VERB`` with these words and options, without those that are None."""
    given = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items() if value is not None]
    return " ".join(["hpctrain data", verb, *map(shell_word, words), *(quote(word) for pair in given for word in pair)])

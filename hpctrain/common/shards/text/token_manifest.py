"""The manifest of a folder of tokens.

::

    DIR/preparation.json    what it is made of
    DIR/manifest.json       written last, so that a folder without it is not whole
    DIR/SPLIT-000000.bin    tokens one after the other, of 16 bits, little-endian; a separator after each document
    DIR/records/            of each part that is done, for ``hpctrain data prepare-text`` to go on from
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import FailFast, Field, ValidationError

from hpctrain.common.files.disk import read_error
from hpctrain.common.files.printable import shell_word
from hpctrain.common.files.regular import read_regular
from hpctrain.common.frozen import FrozenModel
from hpctrain.common.run.directory import model_error
from hpctrain.common.shards.manifest import (
    MANIFEST,
    MOST_MANIFEST_BYTES,
    Count,
    SplitName,
    StoredFile,
    data_command,
    not_there,
)
from hpctrain.common.shards.text.tokenizer import BYTES, TokenizerSettings

SETTINGS = "preparation.json"
TOKEN = np.dtype("<u2")


class TokenFile(FrozenModel):
    """One file of tokens."""

    # Joined to a folder's path, so that it must not lead out of it.
    name: Annotated[str, Field(pattern=r"^(train|val)-[0-9]{6,}\.bin$")]
    tokens: Count
    documents: Count
    sha256: str

    @property
    def stored(self) -> StoredFile:
        """The file, as it is compared."""
        return StoredFile(self.name, self.sha256, self.tokens * TOKEN.itemsize)


class TokenSplit(FrozenModel):
    """The files of the training or the validation split."""

    shards: Annotated[tuple[TokenFile, ...], FailFast()]

    @property
    def tokens(self) -> int:
        """Of all files."""
        return sum(file.tokens for file in self.shards)

    @property
    def documents(self) -> int:
        """Of all files."""
        return sum(file.documents for file in self.shards)

    @property
    def fingerprint(self) -> str:
        """A text that differs for other tokens."""
        return hashlib.sha256("".join(file.sha256 for file in self.shards if file.tokens).encode()).hexdigest()


class TextSettings(FrozenModel):
    """What determines the bytes of the shards; ``listing`` is the SHA-256 of the files' names and sizes."""

    sources: tuple[str, ...]
    listing: str
    tokenizer_file: str
    separator: str
    tokenizer: TokenizerSettings
    validation_share: float
    seed: int
    part_bytes: int


class TextManifest(FrozenModel):
    """``manifest.json`` of a folder of tokens."""

    format: Literal["text-1"] = "text-1"
    train: TokenSplit
    val: TokenSplit
    settings: TextSettings

    def split(self, name: SplitName) -> TokenSplit:
        """The split with this name."""
        return self.train if name == "train" else self.val

    @property
    def files(self) -> list[StoredFile]:
        """The files of both splits."""
        return [file.stored for file in (*self.train.shards, *self.val.shards)]


def read_text_manifest(folder: Path) -> TextManifest:
    """The manifest of a folder of tokens.

    Raises:
        HpctrainError: the folder is no folder of tokens, is not whole, or its manifest is damaged.
    """
    path = folder / MANIFEST
    again = f"hpctrain data prepare-text SOURCE {shell_word(folder)} --tokenizer FILE"
    try:
        return TextManifest.model_validate_json(read_regular(path, MOST_MANIFEST_BYTES))
    except FileNotFoundError as error:
        raise not_there(folder, f"{again} makes it, or continues where it stopped") from error
    except OSError as error:
        raise read_error(error, path, "name a folder of tokens") from error
    except ValidationError as error:
        raise model_error(error, path, f"{again} writes it again") from error


def command(settings: TextSettings, folder: Path) -> str:
    """The command that makes or completes a folder."""
    return data_command(
        "prepare-text",
        *settings.sources,
        folder,
        tokenizer=settings.tokenizer_file,
        separator=settings.separator if settings.tokenizer_file != BYTES else None,
        validation_share=settings.validation_share,
        seed=settings.seed,
        part_mb=f"{settings.part_bytes / (1 << 20):.17g}",
    )

"""The manifest of a folder of tokens, and the tokens from anywhere in one long row.

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
from numpy.typing import NDArray
from pydantic import FailFast, Field

from hpctrain.common.files.printable import shell_word
from hpctrain.common.files.regular import open_regular
from hpctrain.common.frozen import FrozenModel
from hpctrain.common.shards.manifest import (
    Count,
    SplitName,
    StoredFile,
    data_command,
    read_as,
    require_sizes,
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


class TextOptions(FrozenModel):
    """How tokens are made.

    Attributes:
        separator: the token between documents; ``bytes`` ignores it.
        validation_share: the share of the documents that are set apart, between 0 and 1.
        seed: decides which documents are set apart.
        part_bytes: text that one process turns into a shard at once.
    """

    separator: str = "<|endoftext|>"
    validation_share: float = 0.0005
    seed: int = 0
    part_bytes: int = 64 << 20


class TextSettings(TextOptions):
    """What determines the bytes of the shards; ``listing`` is the SHA-256 of the files' names and sizes."""

    sources: tuple[str, ...]
    listing: str
    tokenizer_file: str
    tokenizer: TokenizerSettings


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
    """The manifest of a folder of tokens; its errors are those of :func:`hpctrain.common.shards.manifest.read_as`."""
    again = f"hpctrain data prepare-text SOURCE {shell_word(folder)} --tokenizer FILE"
    return read_as(
        TextManifest, folder, lambda: f"{again} makes it, or continues where it stopped", f"{again} writes it again"
    )


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


class TokenShards:
    """One split of a folder of tokens, mapped into memory for each read: the processes of a host share one copy.

    Args:
        folder: what ``hpctrain data prepare-text`` wrote.
        split: which set, ``train`` or ``val``.

    Raises:
        HpctrainError: the folder is not whole, or a shard has not its size.
    """

    def __init__(self, folder: Path, split: SplitName) -> None:
        self.folder = folder
        self.manifest: TextManifest = read_text_manifest(folder)
        self._split = self.manifest.split(split)
        self._files = [file for file in self._split.shards if file.tokens]
        # Where each file ends in the row.
        self._ends = np.cumsum([file.tokens for file in self._files], dtype=np.int64)
        require_sizes(folder, (file.stored for file in self._files), command(self.manifest.settings, folder))

    @property
    def fingerprint(self) -> str:
        """A text that differs for other tokens."""
        return self._split.fingerprint

    def __len__(self) -> int:
        return self._split.tokens

    def read(self, begin: int, count: int) -> NDArray[np.uint16]:
        """Some tokens in a row, from one shard into the next; shape (count,)."""
        number = int(np.searchsorted(self._ends, begin, side="right"))
        start = begin - (int(self._ends[number - 1]) if number else 0)
        rows = []
        while count > 0:
            file = self._files[number]
            # The map is not kept: each holds a file open, and a large text has more files than a process may open.
            with open_regular(self.folder / file.name) as opened:
                row = np.memmap(opened, TOKEN, "r", shape=(file.tokens,))[start : start + count]
            rows.append(row)
            count -= len(row)
            number, start = number + 1, 0
        return np.concatenate(rows)

"""Tokenisers: the bytes themselves, or a ``tokenizer.json`` of the tokenizers library."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.extras import require
from hpctrain.common.files.regular import read_regular
from hpctrain.common.frozen import FrozenModel

BYTES = "bytes"
# The most tokens that 16 bits can number.
_MOST = 1 << 16
# How many texts, and how many characters, are encoded at a time; a longer text is encoded by itself.
_BATCH = 1000
_BATCH_CHARACTERS = 1 << 20
# The limit for a tokenizer.json; with 65,536 tokens it has less than 10 MB.
_MOST_BYTES = 1 << 26
_MOST_CHARACTERS = 300


class TokenizerSettings(FrozenModel):
    """Which tokeniser turned a text into tokens.

    Attributes:
        name: ``bytes``, or the file's name.
        sha256: the hash of the file; empty for ``bytes``.
        vocabulary: the number of different tokens.
        separator: the one after each document.
    """

    name: str
    sha256: str
    vocabulary: int = Field(ge=1, le=_MOST)
    separator: int = Field(ge=0, lt=_MOST)


def wrong_tokenizer(path: Path, problem: str, hint: str = "") -> HpctrainError:
    """The error for a file that does not do as a tokeniser."""
    hint = hint or f"--tokenizer takes a tokenizer.json of the tokenizers library, or {BYTES}"
    return HpctrainError("HT-tokenizer-wrong", "{path}: {problem}", hint, path=path, problem=problem)


class ByteTokenizer:
    """A token for each byte of UTF-8, and one more as separator."""

    settings = TokenizerSettings(name=BYTES, sha256="", vocabulary=257, separator=256)

    def tokens(self, documents: Sequence[str]) -> list[NDArray[np.uint16]]:
        """The tokens of each document and the separator."""
        return [
            np.append(np.frombuffer(text.encode(), np.uint8), [self.settings.separator]).astype(np.uint16)
            for text in documents
        ]


class FileTokenizer:
    """A tokeniser of the tokenizers library, which special tokens written out in a text do not reach.

    Args:
        separator: the token that stands between documents.

    Raises:
        HpctrainError: the library or the file is missing, it is no tokeniser, it has no such token, or more tokens
            than 16 bits can tell apart.
    """

    def __init__(self, path: Path, separator: str) -> None:
        require("text")
        from tokenizers import Tokenizer as Library

        self._path = path
        try:
            content = read_regular(path, _MOST_BYTES)
        except OSError as error:
            raise wrong_tokenizer(path, f"cannot be read: {error.strerror}") from error
        with self._naming("is not a tokeniser"):
            self._library = Library.from_buffer(content)
            self._library.no_truncation()
            self._library.no_padding()
            self._library.encode_special_tokens = True
            ids = self._library.get_vocab(with_added_tokens=True)
            special = [token.content for token in self._library.get_added_tokens_decoder().values()]
        if separator not in ids:
            hint = f"--separator TOKEN; {nearest(separator, special)}" if special else "--separator TOKEN names another"
            raise wrong_tokenizer(path, f"has no token {separator!r} to separate documents with", hint)
        vocabulary = max(ids.values()) + 1
        if vocabulary > _MOST:
            problem = f"has {vocabulary:,} tokens, but shards hold 16-bit tokens: at most {_MOST:,}"
            raise wrong_tokenizer(path, problem, "choose a tokeniser with fewer, such as GPT-2's with 50,257")
        self.settings = TokenizerSettings(
            name=path.name,
            sha256=hashlib.sha256(content).hexdigest(),
            vocabulary=vocabulary,
            separator=ids[separator],
        )

    def tokens(self, documents: Sequence[str]) -> list[NDArray[np.uint16]]:
        """The tokens of each document and the separator."""
        rows = []
        for batch in _batches(documents):
            with self._naming("cannot encode a text"):
                encoded = self._library.encode_batch_fast(batch, add_special_tokens=False)
                rows += [np.array([*document.ids, self.settings.separator], np.uint16) for document in encoded]
        return rows

    @contextlib.contextmanager
    def _naming(self, problem: str) -> Iterator[None]:
        """Name the file in whatever the library raises: plain Exceptions, and where its Rust panics, BaseExceptions."""
        try:
            yield
        except (MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            words = (str(error) or type(error).__name__)[:_MOST_CHARACTERS]
            raise wrong_tokenizer(self._path, f"{problem}: {words}") from error


def _batches(documents: Sequence[str]) -> Iterator[Sequence[str]]:
    begin = characters = 0
    for end, text in enumerate(documents):
        if end > begin and (end - begin == _BATCH or characters + len(text) > _BATCH_CHARACTERS):
            yield documents[begin:end]
            begin, characters = end, 0
        characters += len(text)
    if documents:
        yield documents[begin:]


Tokenizer = ByteTokenizer | FileTokenizer


def open_tokenizer(name: str, separator: str) -> Tokenizer:
    """The tokeniser that a command names: ``bytes``, or a file."""
    return ByteTokenizer() if name == BYTES else FileTokenizer(Path(name), separator)

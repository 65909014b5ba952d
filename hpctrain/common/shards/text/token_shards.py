"""Reads the tokens of a folder (:mod:`hpctrain.common.shards.text.token_manifest`) from anywhere in one long row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.files.regular import open_regular
from hpctrain.common.shards.manifest import SplitName, require_sizes
from hpctrain.common.shards.text.token_manifest import TOKEN, TextManifest, command, read_text_manifest


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

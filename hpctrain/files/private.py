"""Folders and files that only their owner can read, whatever the umask."""

from __future__ import annotations

import os
from pathlib import Path


def make_folder(path: Path, *, exist_ok: bool = True) -> None:
    """Create a folder for its owner alone, and missing parents likewise.

    One that is there already keeps its mode, as its owner may share it.

    Raises:
        OSError: it cannot be made, or is there already and ``exist_ok`` is not set.
    """
    for parent in reversed(path.parents):
        if not parent.exists():
            parent.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=exist_ok)


def private(path: str, flags: int) -> int:
    """An ``opener`` for :func:`open` that makes files readable by their owner only."""
    return os.open(path, flags, 0o600)


def write_private(path: Path, text: str) -> None:
    """Write or replace a file in UTF-8; one that is there already keeps its mode.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "w", encoding="utf-8", opener=private) as file:
        file.write(text)

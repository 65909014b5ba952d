"""Folders and files that only their owner can read, whatever the umask."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from hpctrain.files.regular import open_descriptor
from hpctrain.files.whole import temporary


def make_folder(path: Path, *, exist_ok: bool = True, within: Path | None = None) -> None:
    """Create a folder for its owner alone, and missing parents likewise.

    One that is there already keeps its mode, as its owner may share it.

    Args:
        within: a folder above it that has to be there, like a run's directory.

    Raises:
        OSError: it cannot be made, or is there already and ``exist_ok`` is not set.
    """
    for parent in reversed(path.parents):
        if (within is None or within in parent.parents) and not parent.exists():
            parent.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=exist_ok)


def private(path: str, flags: int) -> int:
    """An ``opener`` for :func:`open` that makes files readable by their owner only, and follows no link to others."""
    return open_descriptor(Path(path), flags)


def write_private(path: Path, text: str) -> None:
    """Write or replace a file in UTF-8, never one that a link leads to; one that is there already keeps its mode.

    Raises:
        OSError: it cannot be written.
    """
    fresh = temporary(path)
    try:
        with open(fresh, "x", encoding="utf-8", opener=private) as file:
            file.write(text)
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISREG(mode := path.lstat().st_mode):
                    os.fchmod(file.fileno(), mode & 0o777)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)

"""Folders and files that only their owner can read, whatever the umask."""

from __future__ import annotations

from pathlib import Path

from hpctrain.common.files.regular import open_descriptor


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

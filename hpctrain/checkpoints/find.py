"""Which checkpoints are whole, and the setting aside of those that are not."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoints.layout import checkpoint_path, iterations, set_aside_path
from hpctrain.checkpoints.manifest import FileRecord, read_manifest
from hpctrain.errors import HpctrainError
from hpctrain.events import disk_error


@dataclass(frozen=True, kw_only=True)
class Newest:
    """The newest whole checkpoint.

    Attributes:
        iteration: 0 where there is none.
        damaged: newer ones, the newest first, each with what is wrong with it.
    """

    iteration: int = 0
    damaged: tuple[tuple[Path, str], ...] = ()


def newest_whole(folder: Path) -> Newest:
    """Look for it among all checkpoints in ``folder``, by the lengths and hashes of their files.

    It may be looked for while a run writes new ones and deletes old ones.
    """
    damaged: list[tuple[Path, str]] = []
    overtaken = False
    for iteration in reversed(iterations(folder)):
        path = checkpoint_path(folder, iteration)
        if not (faults := verify(path)):
            return Newest(iteration=iteration, damaged=tuple(damaged))
        if path.exists():
            damaged.append((path, "; ".join(faults)))
        else:
            overtaken = True
    # Of those that were there all are gone by now: newer ones have come.
    return newest_whole(folder) if overtaken else Newest(damaged=tuple(damaged))


def verify(path: Path, *, hashes: bool = True) -> list[str]:
    """What is wrong with a checkpoint; nothing where every file is as its manifest says.

    Args:
        path: of the checkpoint.
        hashes: compare the contents of the shares too, not only their lengths.
    """
    try:
        manifest = read_manifest(path)
    except HpctrainError as error:
        return [error.message]
    if checkpoint_path(path.parent, manifest.progress.iteration) != path and path.name.startswith("step-"):
        return [f"{path} is of step {manifest.progress.iteration}"]
    return [fault for name, record in manifest.files.items() if (fault := _fault(path / name, record, hashes))]


def set_aside(path: Path) -> Path:
    """Give a damaged checkpoint another name, under which nothing looks for it; returns that.

    Raises:
        HpctrainError: the disk refuses.
    """
    free = set_aside_path(path)
    try:
        return path.rename(free)
    except OSError as error:
        raise disk_error(error, path) from error


def _fault(path: Path, record: FileRecord, hashes: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"{path} has {size} bytes instead of {record.bytes}"
        if not hashes:
            return None
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    return None if digest == record.sha256 else f"{path} is not what was written: its SHA-256 differs"

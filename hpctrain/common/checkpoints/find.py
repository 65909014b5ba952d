"""Finds the newest whole checkpoint, and renames damaged ones."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hpctrain.common.checkpoints.layout import DAMAGED, checkpoint_path, iterations
from hpctrain.common.checkpoints.manifest import FileRecord, OtherVersionError, read_manifest
from hpctrain.common.checkpoints.read import read_index
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.regular import open_regular


@dataclass(frozen=True, kw_only=True)
class Newest:
    """The newest whole checkpoint.

    Attributes:
        iteration: 0 where there is none.
        damaged: newer ones, the newest first, each with what is wrong with it.
    """

    iteration: int = 0
    damaged: tuple[tuple[Path, str], ...] = ()


def newest_whole(folder: Path, *, hashes: bool = True) -> Newest:
    """Find the newest whole checkpoint in ``folder``, by the lengths and hashes of its files.

    It may be looked for while a run writes new ones and deletes old ones.

    Raises:
        OtherVersionError: the newest that is not damaged cannot be read by this hpctrain.
    """
    before: list[int] = []
    while True:
        damaged: list[tuple[Path, str]] = []
        there, overtaken = iterations(folder), False
        for iteration in reversed(there):
            path = checkpoint_path(folder, iteration)
            if not (faults := verify(path, hashes=hashes)):
                return Newest(iteration=iteration, damaged=tuple(damaged))
            if os.path.lexists(path):
                damaged.append((path, "; ".join(faults)))
            else:
                overtaken = True
        # If some listed checkpoints are gone, newer ones have replaced them, so the search starts again.
        if not overtaken or there == before:
            return Newest(damaged=tuple(damaged))
        before = there


def verify(path: Path, *, hashes: bool = True) -> list[str]:
    """The faults of a checkpoint; empty if every file matches its manifest.

    Args:
        hashes: compare the contents of the shares too, not only their lengths, and look whether the pieces of each
            array make all of it.

    Raises:
        OtherVersionError: another version wrote it, so this one cannot judge it.
    """
    try:
        manifest = read_manifest(path)
    except OtherVersionError:
        raise
    except HpctrainError as error:
        return [error.message]
    if checkpoint_path(path.parent, manifest.progress.iteration) != path and path.name.startswith("step-"):
        return [f"{path} is from step {manifest.progress.iteration}"]
    faults = [fault for name, record in manifest.files.items() if (fault := _fault(path / name, record, hashes))]
    if faults or not hashes:
        return faults
    try:
        read_index(path, manifest)
    except HpctrainError as error:
        return [error.message]
    return []


def require_whole(path: Path) -> None:
    """Refuse a checkpoint that is damaged."""
    if faults := verify(path):
        raise HpctrainError(
            "HT-checkpoint-damaged",
            "{lines}",
            "hpctrain checkpoint list RUN_DIR shows those that are whole",
            exit_code=3,
            lines="\n".join(faults),
        )


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that nothing looks for it; returns the new path."""
    free, number = path.with_name(f"{DAMAGED}{path.name}"), 1
    while free.exists():
        number += 1
        free = path.with_name(f"{DAMAGED}{path.name}-{number}")
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
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    return None if digest == record.xxh128 else f"{path} is not what was written: its hash differs"

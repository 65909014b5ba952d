"""Files that are there whole, or not at all."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from hpctrain.events import disk_error

_ELSEWHERE = "choose another folder"


def write_whole(path: Path, content: bytes) -> None:
    """Write or replace a file; it survives a crash of the machine.

    Raises:
        HpctrainError: the disk is full, or refuses.
    """
    fresh = temporary(path)
    try:
        try:
            with fresh.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            put_in_place(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(error, path, _ELSEWHERE) from error


def temporary(path: Path) -> Path:
    """A hidden name beside a file that no other process takes."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")


def put_in_place(fresh: Path, path: Path) -> None:
    """Rename a file that is on disk whole."""
    fresh.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed had not finished."""
    for path in folder.glob(".*.part"):
        path.unlink(missing_ok=True)

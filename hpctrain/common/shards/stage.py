"""Copies a folder of shards to a local disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error, reading, require_empty
from hpctrain.common.files.printable import shell_word
from hpctrain.common.files.regular import open_regular, read_regular
from hpctrain.common.files.whole import locked, put_in_place, remove_leftovers, require_room, temporary, write_whole
from hpctrain.common.shards.image_shards import open_shards
from hpctrain.common.shards.manifest import MANIFEST, MOST_MANIFEST_BYTES, damaged, read_manifest

_BLOCK_BYTES = 4 << 20
_ELSEWHERE = "stage to another folder"


def _misuse(problem: str, hint: str) -> HpctrainError:
    return HpctrainError("HT-stage-wrong", "{problem}", hint, problem=problem)


@dataclass(frozen=True, kw_only=True)
class StagedFolder:
    """The numbers of files and bytes copied, and of files already there."""

    copied: int
    bytes: int
    there: int


def stage(source: Path, to: Path, *, wait_seconds: float, check: bool = False) -> StagedFolder:
    """Copy a set; files that are there are kept. The result is opened like the original.

    One process of a node copies, and others that are called meanwhile wait and find all there. The manifest is copied
    last, so that a folder without one is a copy that was interrupted.

    Args:
        check: compare the hashes of shards that are there too, rather than their sizes alone.

    Raises:
        HpctrainError: the source is not whole, ``to`` holds something else, there is too little room, or the wait is
            over.
    """
    manifest = read_manifest(source)
    for split in manifest.splits:
        open_shards(source, split)
    if to.resolve() == source.resolve():
        raise _misuse(f"{source} cannot be staged to itself", "name a folder on a disk of the node")
    source = source.absolute()
    content = read_regular(source / MANIFEST, MOST_MANIFEST_BYTES)
    with locked(to, seconds=wait_seconds):
        try:
            complete = (to / MANIFEST).exists()
            if not complete:
                require_empty(to, {file.name for file in manifest.files})
            elif read_regular(to / MANIFEST, MOST_MANIFEST_BYTES) != content:
                raise _misuse(f"{to} holds another set of shards", f"rm -r {shell_word(to)}, or {_ELSEWHERE}")
            remove_leftovers(to)
            missing = []
            for file in manifest.files:
                # Only of a complete copy, whose files are this set's, sizes say enough.
                hashed = check or not complete or file.size is None
                if (to / file.name).is_symlink() or file.fault(to, hashed=hashed):
                    missing.append(file)
            size = sum(file.size or 0 for file in missing)
            require_room(to, size, "copied", f"free some space there, or {_ELSEWHERE}")
            for file in missing:
                _copy(source / file.name, to / file.name, file.sha256)
            if not complete:
                write_whole(to / MANIFEST, content)
        except OSError as error:
            raise disk_error(error, to, _ELSEWHERE) from error
    return StagedFolder(copied=len(missing), bytes=size, there=len(manifest.files) - len(missing))


def _copy(source: Path, to: Path, sha256: str) -> None:
    fresh = temporary(to)
    digest = hashlib.sha256()
    try:
        with fresh.open("xb") as copy:
            for block in _blocks(source):
                digest.update(block)
                copy.write(block)
            copy.flush()
            os.fsync(copy.fileno())
        if digest.hexdigest() != sha256:
            raise damaged(source, "not as it was written: cut short or changed", exit_code=3)
        put_in_place(fresh, to)
    finally:
        fresh.unlink(missing_ok=True)


def _blocks(path: Path) -> Iterator[bytes]:
    """The blocks of a file of the source; an error names it, and not the target."""
    with reading(path, "is it still there?", exit_code=1), open_regular(path) as file:
        while block := file.read(_BLOCK_BYTES):
            yield block

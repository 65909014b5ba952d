"""The node's cache of shards in object storage: a folder of shards whose files are fetched when they are first read.

::

    CACHE/NAME-HASH/              one set of shards; HASH is of its URL and its manifest
    CACHE/NAME-HASH/origin.json   the URL that missing files are fetched from
    CACHE/NAME-HASH/…             as in any folder of shards

Files are fetched whole and once per node, by whichever process needs one first; others wait for it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.cache import node_folder
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.locks import locked
from hpctrain.common.files.objects import Objects, all_attempts_seconds
from hpctrain.common.files.regular import read_regular
from hpctrain.common.files.whole import remove_leftovers, require_room, write_whole
from hpctrain.common.frozen import FrozenModel
from hpctrain.common.settings import CACHE
from hpctrain.common.shards.manifest import MANIFEST, MOST_MANIFEST_BYTES, ORIGIN, StoredFile, damaged

_ELSEWHERE = f"{CACHE.name}=DIR chooses another folder"
# How many digits of a hash a folder's name has.
_DIGITS = 16
_MOST_ORIGIN_BYTES = 1 << 16
# Added to the time of all attempts of the process that is waited for: it also compares hashes and writes.
_SPARE_SECONDS = 10.0


class _Origin(FrozenModel):
    url: str


class ShardFiles:
    """The files of a folder of shards, by name; a cache fetches missing files when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def objects(self) -> Objects | None:
        """The objects that a cache holds copies of; None for other folders."""
        path = self.folder / ORIGIN
        try:
            return Objects(_Origin.model_validate_json(read_regular(path, _MOST_ORIGIN_BYTES)).url)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise HpctrainError(
                "HT-file-unreadable", "cannot read {path}", f"remove {self.folder}: it will be fetched again", path=path
            ) from error

    def where(self, name: str) -> str:
        """Where a file comes from, for messages."""
        return self.objects.at(name) if self.objects else str(self.folder / name)

    def path(self, file: StoredFile) -> Path:
        """The path of a file; in a cache it is there then, and was as the manifest has it when it came.

        Raises:
            HpctrainError: it cannot be fetched, or another process of the node has been fetching it for too long.
        """
        path = self.folder / file.name
        if self.objects is None or path.exists():
            return path
        seconds = all_attempts_seconds() + _SPARE_SECONDS
        with locked(self.folder, seconds=seconds, name=f".{file.name}.lock", elsewhere=_ELSEWHERE):
            # The process that held the lock may have fetched it.
            if not path.exists():
                self.objects.fetch(file.name, path, limit=file.limit, sha256=file.sha256, size=file.size)
        return path

    def check(self, files: Iterable[StoredFile], again: str | None = None) -> None:
        """Compare the sizes of files; of a cache, of those that are there: when others come they are compared whole.

        Args:
            again: of :func:`hpctrain.common.shards.manifest.damaged`.

        Raises:
            HpctrainError: one is not there, or not whole.
        """
        for file in files:
            if self.objects and not (self.folder / file.name).exists():
                continue
            if fault := file.fault(self.folder, hashed=False):
                raise damaged(self.folder / file.name, fault, again)

    def require_room(self, files: Iterable[StoredFile]) -> None:
        """Refuse to begin where the missing ones of these files have no room.

        Raises:
            HpctrainError: the disk has less; says how much it would take.
        """
        if self.objects is None:
            return
        missing = sum(file.size or 0 for file in files if not (self.folder / file.name).exists())
        hint = f"free some space there, or {_ELSEWHERE}; with data.limit only the shards that are read are fetched"
        require_room(self.folder, missing, "fetched", hint)


def fetch_manifest(url: str) -> bytes:
    """The manifest below a URL, as it is there now."""
    return Objects(url).read(MANIFEST, MOST_MANIFEST_BYTES)


def cache_folder(url: str, manifest: bytes) -> Path:
    """The folder on this node for a set of shards, with its manifest in it and whatever was fetched before.

    Sets that were written anew have another folder, so that nothing of an earlier one is ever read.

    Args:
        url: the set's URL, without credentials.
        manifest: the set's manifest, as :func:`fetch_manifest` returned it on some node.

    Raises:
        HpctrainError: the folder cannot be made, or is another user's.
    """
    origin = Objects(url).url
    digest = hashlib.sha256(origin.encode() + b"\n" + manifest).hexdigest()[:_DIGITS]
    name = re.sub(r"[^A-Za-z0-9._-]", "-", origin.rpartition("/")[2])
    folder = _root() / f"{name}-{digest}"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise disk_error(error, folder, _ELSEWHERE) from error
    # Left by killed runs: whatever is being written now is younger than the longest fetch.
    remove_leftovers(folder, older_s=all_attempts_seconds() + _SPARE_SECONDS)
    # The manifest goes last: what has one is complete. Several ranks may write the same.
    for path, content in (
        (folder / ORIGIN, _Origin(url=origin).model_dump_json().encode()),
        (folder / MANIFEST, manifest),
    ):
        if not path.exists():
            write_whole(path, content, elsewhere=_ELSEWHERE)
    return folder


def _root() -> Path:
    """The folder of all sets: that of ``HPCTRAIN_CACHE``, or one of the user's own in the node's temporary storage."""
    chosen = CACHE.read()
    if not chosen:
        # Cached files are not hashed again.
        return node_folder("cache", _ELSEWHERE)
    root = Path(chosen).expanduser()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, root, _ELSEWHERE) from error
    return root.absolute()

"""Copies a folder of shards, or a node's share of it, or all of a set in object storage, to a local disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error, reading
from hpctrain.common.files.locks import locked
from hpctrain.common.files.objects import Objects
from hpctrain.common.files.printable import shell_word
from hpctrain.common.files.regular import open_regular, read_regular, sha256
from hpctrain.common.files.whole import put_in_place, remove_leftovers, require_room, temporary, write_whole
from hpctrain.common.shards.manifest import (
    MANIFEST,
    MOST_MANIFEST_BYTES,
    ShardFile,
    ShardManifest,
    Split,
    parse_manifest,
    read_manifest,
    remake,
)
from hpctrain.common.shards.read import index_path, index_size_fault, most_index_bytes, open_shards

# The manifest of what is being staged, until it is whole.
_BEGUN = "staging.json"
_BLOCK_BYTES = 4 << 20
# A single connection to object storage seldom uses the whole bandwidth.
_FETCHED_AT_ONCE = 8
_ELSEWHERE = "stage to another folder"


@dataclass(frozen=True, kw_only=True)
class NodeShare:
    """Node ``node`` of ``nodes``, from 0. It copies every ``nodes``-th shard, and links to the others."""

    node: int
    nodes: int

    def __post_init__(self) -> None:
        if not 0 <= self.node < self.nodes:
            raise HpctrainError(
                "HT-stage-no-such-node",
                "there is no node {node} of {nodes}",
                f"--node must be 0 to {self.nodes - 1} with --nodes {self.nodes}",
                node=self.node,
                nodes=self.nodes,
            )


@dataclass(frozen=True, kw_only=True)
class StagedFolder:
    """The numbers of files and bytes copied, of those already there, and of linked shards."""

    copied: int
    bytes: int
    there: int
    linked: int


def stage(
    source: Path | Objects, to: Path, share: NodeShare, *, wait_seconds: float, check: bool = False
) -> StagedFolder:
    """Copy a node's share; files that are there are kept. The result is opened like the original.

    One process of a node copies, and others that are called meanwhile wait and find all there.

    Args:
        source: a folder of shards, or what there is below a URL, which can only be copied whole.
        check: compare the hashes of shards that are there too, rather than their sizes alone.

    Raises:
        HpctrainError: the source is not whole, ``to`` holds something else, there is too little room, an object cannot
            be fetched, or the wait is over.
    """
    if isinstance(source, Objects):
        if share.nodes > 1:
            raise HpctrainError(
                "HT-stage-link-to-url",
                "no symbolic link can lead to the other shards of {url}",
                "leave --nodes out: each node gets all of them",
                url=source.url,
            )
        content = source.read(MANIFEST, MOST_MANIFEST_BYTES)
        manifest = parse_manifest(content, source.at(MANIFEST), "put the whole folder there again")
    else:
        manifest = read_manifest(source)
        for split in manifest.splits:
            open_shards(source, split)
        if to.resolve() == source.resolve():
            raise HpctrainError(
                "HT-stage-to-itself",
                "{source} cannot be staged to itself",
                "name a folder on a disk of the node",
                source=source,
            )
        source = source.absolute()
        content = read_regular(source / MANIFEST, MOST_MANIFEST_BYTES)
    with locked(to, seconds=wait_seconds):
        try:
            _begin(to, content)
            done = _stage(source, to, manifest, share, check)
            if not (to / MANIFEST).exists():
                write_whole(to / MANIFEST, content)
            (to / _BEGUN).unlink(missing_ok=True)
            return done
        except OSError as error:
            raise disk_error(error, to, _ELSEWHERE) from error


def _stage(source: Path | Objects, to: Path, manifest: ShardManifest, share: NodeShare, check: bool) -> StagedFolder:
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    own = shards[share.node :: share.nodes]
    missing = [shard for shard in own if not _is_copied(to / shard.name, shard, check)]
    _require_room(to, missing)
    with ThreadPoolExecutor(_FETCHED_AT_ONCE if isinstance(source, Objects) else 1) as pool:
        # After a fault no other copy is begun.
        for _ in pool.map(lambda shard: _copy(source, to, shard), missing):
            pass
    linked = _link(source, to, set(shards) - set(own), check) if isinstance(source, Path) else 0
    for name, split in manifest.splits.items():
        _copy_index(source, index_path(to, name), split)
    return StagedFolder(
        copied=len(missing), bytes=sum(shard.bytes for shard in missing), there=len(own) - len(missing), linked=linked
    )


def _begin(to: Path, content: bytes) -> None:
    """Refuse a folder of something else; leave word of what this one is for."""
    for name in (MANIFEST, _BEGUN):
        if (to / name).exists() and read_regular(to / name, MOST_MANIFEST_BYTES) != content:
            raise HpctrainError(
                "HT-stage-other-shards-there",
                "{folder} holds another set of shards",
                f"rm -r {shell_word(to)}, or {_ELSEWHERE}",
                folder=to,
            )
    if not (to / MANIFEST).exists() and not (to / _BEGUN).exists():
        others = sorted(path.name for path in to.iterdir() if not path.name.startswith("."))
        if others:
            raise HpctrainError(
                "HT-folder-not-empty",
                "{folder} holds other files already: {others}",
                _ELSEWHERE,
                folder=to,
                others=", ".join(others[:3]),
            )
        write_whole(to / _BEGUN, content)
    remove_leftovers(to)


def _is_copied(path: Path, shard: ShardFile, check: bool) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != shard.bytes:
        return False
    return not check or sha256(path)[0] == shard.sha256


def _require_room(to: Path, missing: Iterable[ShardFile]) -> None:
    wanted = sum(shard.bytes for shard in missing)
    require_room(to, wanted, "copied", "free some space there, or stage a share to each node with --nodes N --node I")


def _copy(source: Path | Objects, to: Path, shard: ShardFile) -> None:
    path = to / shard.name
    if isinstance(source, Objects):
        source.fetch(shard.name, path, limit=shard.bytes, sha256=shard.sha256, size=shard.bytes)
        return
    fresh = temporary(path)
    digest = hashlib.sha256()
    try:
        with fresh.open("xb") as file:
            for block in _blocks(source / shard.name):
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != shard.sha256:
            raise _damaged(source / shard.name)
        put_in_place(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def _blocks(path: Path) -> Iterator[bytes]:
    """The blocks of a file of the source; an error names it, and not the target."""
    with reading(path, "is it still there?", exit_code=1), open_regular(path) as file:
        while block := file.read(_BLOCK_BYTES):
            yield block


def _copy_index(source: Path | Objects, to: Path, split: Split) -> None:
    if to.exists() and not index_size_fault(to, split) and sha256(to)[0] == split.index_sha256:
        return
    if isinstance(source, Objects):
        source.fetch(to.name, to, limit=most_index_bytes(split), sha256=split.index_sha256)
        return
    if index_size_fault(source / to.name, split):
        raise _damaged(source / to.name)
    content = b"".join(_blocks(source / to.name))
    if hashlib.sha256(content).hexdigest() != split.index_sha256:
        raise _damaged(source / to.name)
    write_whole(to, content)


def _damaged(path: Path) -> HpctrainError:
    return HpctrainError(
        "HT-shard-damaged",
        "{path} is not as it was written: cut short or changed",
        f"{remake(path.parent)} makes it again",
        exit_code=3,
        path=path,
    )


def _link(folder: Path, to: Path, others: Collection[ShardFile], check: bool) -> int:
    """Let the shards of other nodes be reached where they are, unless they were copied; how many that are."""
    for shard in others:
        path = to / shard.name
        if not _is_copied(path, shard, check) and not (path.is_symlink() and path.readlink() == folder / shard.name):
            path.unlink(missing_ok=True)
            path.symlink_to(folder / shard.name)
    return len(others)

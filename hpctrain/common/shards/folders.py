"""Compares folders of shards, of photographs or of tokens, with their manifests; a folder may be object storage."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import temporary_folder
from hpctrain.common.files.objects import DamagedObjectError, Objects
from hpctrain.common.files.regular import sha256
from hpctrain.common.shards.manifest import (
    MANIFEST,
    MOST_MANIFEST_BYTES,
    SETTINGS,
    ShardManifest,
    Split,
    WrittenFile,
    read_manifest,
    remake,
)
from hpctrain.common.shards.read import index_fault, index_path, index_size_fault, most_index_bytes, read_index
from hpctrain.common.shards.text import manifest as text

# Hashing runs beside other threads; more of them than this help no disk.
_MOST_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class FileFault:
    """A fault of one file in the folder."""

    file: str
    fault: str


@dataclass(frozen=True, kw_only=True)
class VerifiedFolder:
    """A folder compared with its manifest.

    Attributes:
        shards: how many the manifest lists.
        holds: a sentence part that says what is in them.
        remedy: the command that makes the faulty files again.
    """

    shards: int
    holds: str
    faults: tuple[FileFault, ...]
    remedy: str


def training_fingerprint(folder: Path, data: str) -> str:
    """A text that differs for other training samples.

    Args:
        folder: what ``hpctrain data shard`` or ``hpctrain data prepare-text`` wrote.
        data: the recipe's data, ``imagenet`` or ``text``.

    Raises:
        HpctrainError: the folder is no whole one of that kind.
    """
    if data == "text":
        return text.read_text_manifest(folder).train.fingerprint
    return read_manifest(folder).splits["train"].index_sha256


def holds_text(source: Path | Objects) -> bool:
    """Whether a folder, or what there is below a URL, is one of tokens.

    Raises:
        HpctrainError: the manifest below the URL cannot be fetched.
    """
    if isinstance(source, Objects):
        return text.is_of_text(source.read(MANIFEST, MOST_MANIFEST_BYTES))
    return (source / text.SETTINGS).exists()


def verify_folder(source: Path | Objects) -> VerifiedFolder:
    """Compare sizes, hashes and counts. Objects are fetched a few at a time, and none is kept.

    Args:
        source: a folder of shards, or what there is below a URL.

    Raises:
        HpctrainError: there is no manifest, it is damaged, or an object cannot be fetched.
    """
    if isinstance(source, Path):
        return _verified_text(source) if holds_text(source) else _verified_images(source)
    with temporary_folder("hpctrain-verify-", None, "TMPDIR=DIR chooses another folder") as name:
        folder = Path(name)
        content = source.read(MANIFEST, MOST_MANIFEST_BYTES)
        (folder / MANIFEST).write_bytes(content)
        found = (_verified_text if text.is_of_text(content) else _verified_images)(folder, source)
    return replace(found, remedy=f"a new upload of the folder to {source.url}")


def _verified_text(folder: Path, objects: Objects | None = None) -> VerifiedFolder:
    manifest = text.read_text_manifest(folder)
    files = [*manifest.train.shards, *manifest.val.shards]
    return VerifiedFolder(
        shards=len(files),
        holds=f"{manifest.train.tokens} tokens in train, {manifest.val.tokens} tokens in val",
        faults=tuple(file_faults(folder, files, objects)),
        remedy=text.command(manifest.settings, folder),
    )


def _verified_images(folder: Path, objects: Objects | None = None) -> VerifiedFolder:
    from hpctrain.common.shards.make import command

    manifest, faults = verify(folder, objects)
    shrinking = manifest.settings.shrinking
    smaller = f", shrunk to a short side of {shrinking.short_side} pixels" if shrinking else ""
    return VerifiedFolder(
        shards=sum(len(split.shards) for split in manifest.splits.values()),
        holds=", ".join(f"{split.samples} images in {name}" for name, split in manifest.splits.items()) + smaller,
        faults=faults,
        remedy=command(manifest.settings, folder) if (folder / SETTINGS).exists() else remake(folder),
    )


def verify(folder: Path, objects: Objects | None = None) -> tuple[ShardManifest, tuple[FileFault, ...]]:
    """The manifest, and all differences from it: sizes and hashes of shards, and indices with their counts.

    Args:
        folder: holds the shards, or their manifest alone if they are in object storage.
        objects: where the other files are; none of them stays in the folder.

    Raises:
        HpctrainError: there is no manifest, it is damaged, or an object cannot be fetched.
    """
    manifest = read_manifest(folder)
    faults = file_faults(folder, [shard for split in manifest.splits.values() for shard in split.shards], objects)
    for name, split in manifest.splits.items():
        path = index_path(folder, name)
        missing = _fetch_fault(objects, path, split.index_sha256, most_index_bytes(split)) if objects else None
        faults += [missing] if missing else _index_faults(folder, name, split, len(manifest.classes))
    return manifest, tuple(faults)


def file_faults(folder: Path, shards: Sequence[WrittenFile], objects: Objects | None = None) -> list[FileFault]:
    """The files whose size or hash differs from what the manifest recorded; see :func:`verify`."""

    def fault(shard: WrittenFile) -> FileFault | None:
        path = folder / shard.name
        if objects is None:
            return _shard_fault(folder, shard)
        try:
            return _fetch_fault(objects, path, shard.sha256, shard.bytes, shard.bytes)
        finally:
            path.unlink(missing_ok=True)

    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        return list(filter(None, pool.map(fault, shards)))


def _fetch_fault(objects: Objects, path: Path, sha256: str, limit: int, size: int | None = None) -> FileFault | None:
    """The fault of an object; None if it can be fetched, because fetching compares its hash.

    Raises:
        HpctrainError: it cannot be fetched, which says nothing of the object, or there is no room for it.
    """
    try:
        objects.fetch(path.name, path, limit=limit, sha256=sha256, size=size)
    except DamagedObjectError as error:
        return FileFault(file=path.name, fault=error.message.removeprefix(f"{objects.at(path.name)}: "))
    return None


def _shard_fault(folder: Path, shard: WrittenFile) -> FileFault | None:
    try:
        size = (folder / shard.name).stat().st_size
        if size != shard.bytes:
            how = "cut short" if size < shard.bytes else "too long"
            return FileFault(file=shard.name, fault=f"{how}: {size} bytes of {shard.bytes}")
        digest, _ = sha256(folder / shard.name)
    except OSError as error:
        return FileFault(file=shard.name, fault=error.strerror or str(error))
    if digest != shard.sha256:
        return FileFault(file=shard.name, fault="changed: its SHA-256 is not the one it was written with")
    return None


def _index_faults(folder: Path, name: str, split: Split, classes: int) -> Iterator[FileFault]:
    path = index_path(folder, name)
    try:
        if wrong := index_size_fault(path, split):
            yield FileFault(file=path.name, fault=wrong)
            return
        digest, _ = sha256(path)
        index = read_index(folder, name)
    except OSError as error:
        yield FileFault(file=path.name, fault=error.strerror or str(error))
        return
    except HpctrainError as error:
        yield FileFault(file=path.name, fault=error.message)
        return
    if digest != split.index_sha256:
        yield FileFault(file=path.name, fault="changed: its SHA-256 is not the one it was written with")
    fault = index_fault(index, split, classes)
    if fault:
        yield FileFault(file=path.name, fault=fault)
    counts = Counter(np.asarray(index["shard"]).tolist())
    for number, shard in enumerate(split.shards):
        if counts[number] != shard.samples:
            yield FileFault(file=path.name, fault=f"{counts[number]} rows of {shard.name}, which has {shard.samples}")

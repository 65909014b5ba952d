"""Folders of shards of either kind: photographs, or tokens of text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.common.files.disk import temporary_folder
from hpctrain.common.files.objects import Objects
from hpctrain.common.shards.manifest import MANIFEST, MOST_MANIFEST_BYTES, SETTINGS, read_manifest, remake
from hpctrain.common.shards.text import manifest as text
from hpctrain.common.shards.verify import FileFault, file_faults, verify


@dataclass(frozen=True, kw_only=True)
class VerifiedFolder:
    """A folder compared with its manifest.

    Attributes:
        shards: how many there are to be.
        holds: what is in them, in words.
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
        data: of a recipe, ``imagenet`` or ``text``.

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
    return VerifiedFolder(
        shards=sum(len(split.shards) for split in manifest.splits.values()),
        holds=", ".join(f"{split.samples} images in {name}" for name, split in manifest.splits.items()),
        faults=faults,
        remedy=command(manifest.settings, folder) if (folder / SETTINGS).exists() else remake(folder),
    )

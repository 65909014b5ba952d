"""Makes shards of images, with the same bytes for any number of processes."""

from __future__ import annotations

import hashlib
import io
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hpctrain.common.files.whole import locked, require_room, write_whole
from hpctrain.common.shards.image_sources import find_source
from hpctrain.common.shards.listing import ImageFile, list_part, require_distinct
from hpctrain.common.shards.manifest import (
    MANIFEST,
    SETTINGS,
    AbsolutePath,
    BrokenImage,
    ShardManifest,
    ShardOptions,
    ShardSettings,
    Split,
    SplitName,
    data_command,
    index_name,
    wrong_source,
)
from hpctrain.common.shards.one_shard import ShardRecord, ShardTask, make_shard, tar_bytes
from hpctrain.common.shards.parquet import Columns
from hpctrain.common.shards.resumable import Map, begin, make_all, write_model

_Item = TypeVar("_Item")
# Images of Parquet files are mixed over this many shards; each shard reads that much for it.
_MIXED_SHARDS = 8


class ShardRequest(ShardOptions):
    """The shards that are to be made in a folder."""

    source: AbsolutePath
    folder: AbsolutePath


def make_shards(sharding: ShardRequest, run: Map, say: Callable[[str], None]) -> ShardManifest:
    """Make the folder, or its missing and damaged parts; the manifest comes last.

    Args:
        run: does the work, its results in order.
        say: is called with lines of progress.

    Raises:
        HpctrainError: the source is not whole, the folder is of another source or other settings, another process
            works in it, or the disk is full.
    """
    columns = Columns(image=sharding.image_column, label=sharding.label_column)
    share = sharding.validation_share
    source = find_source(sharding.source, columns, divided=share is None)
    parts = {split: list_images(sharding.source, split, parts, run) for split, parts in source.parts.items()}
    if share is not None:
        parts = divided(sharding.source, source.classes, parts["train"], share)
    splits = {split: list(chain.from_iterable(listed)) for split, listed in parts.items()}
    say(f"{sharding.source}: " + ", ".join(f"{len(images)} images in {split}" for split, images in splits.items()))
    settings = ShardSettings(
        **sharding.model_dump(exclude={"source", "folder"}),
        source=str(sharding.source),
        listing=listing_digest(splits),
    )
    tasks = plan_shards(sharding, source.column, parts)
    # The process that hands out the work holds the lock, since it may outlive the one that started it.
    with locked(sharding.folder, seconds=0):
        begin(sharding.folder / SETTINGS, settings, {"source"}, command)
        _require_room(sharding.folder, tasks)
        records = make_all(sharding.folder, make_shard, tasks, run, say)
        return _finish(sharding.folder, source.classes, settings, list(zip(tasks, records, strict=True)))


def list_images(source: Path, split: SplitName, parts: Sequence[Any], run: Map) -> list[list[ImageFile]]:
    """The images of each part of a split.

    Raises:
        HpctrainError: there are none, two have one name, or a part cannot be read.
    """
    listed = list(run(list_part, parts))
    members = list(chain.from_iterable(listed))
    if not members:
        raise wrong_source(source, f"has no image in {split}", "both train and val need some")
    require_distinct(members)
    return listed


def drawn(key: str) -> int:
    """A number below 2^64 from an image's name alone; those below a limit validate (:func:`divided`)."""
    return int.from_bytes(hashlib.sha256(os.fsencode(key)).digest()[:8], "big")


def divided(
    source: Path, classes: Sequence[str], parts: Sequence[Sequence[ImageFile]], share: float
) -> dict[SplitName, list[list[ImageFile]]]:
    """The images of each class for training and for validation, by their names, so that images that come or go move no
    other; except that of two images or more each gets one.

    Raises:
        HpctrainError: a class has a single image.
    """
    splits: dict[SplitName, list[list[ImageFile]]] = {"train": [], "val": []}
    for name, members in zip(classes, parts, strict=True):
        if len(members) == 1:
            hint = "add another image, or leave the class out"
            raise wrong_source(source / name, "has one image, and both train and val need one", hint)
        numbers = [drawn(member.key) for member in members]
        limit = min(max(math.ceil(share * 2**64), min(numbers) + 1), max(numbers))
        splits["train"].append([member for member, number in zip(members, numbers, strict=True) if number >= limit])
        splits["val"].append([member for member, number in zip(members, numbers, strict=True) if number < limit])
    return splits


def listing_digest(splits: Mapping[SplitName, Iterable[ImageFile]]) -> str:
    """A digest that identifies a source independently of place and packing: keys, sizes and labels of its images."""
    digest = hashlib.sha256()
    for split, members in splits.items():
        for member in members:
            digest.update(f"{split} {member.key} {member.size} {member.label}\n".encode())
    return digest.hexdigest()


def plan_shards(
    sharding: ShardRequest, column: str | None, parts: Mapping[SplitName, Sequence[Sequence[ImageFile]]]
) -> list[ShardTask]:
    """Which images each shard holds: those of training shuffled by the seed, so that each shard mixes the classes, and
    those of validation as they are listed. ``column`` is that of the images in Parquet files.
    """
    tasks = []
    for split, listed in parts.items():
        members = list(chain.from_iterable(listed))
        if split == "train":
            generator = np.random.default_rng(sharding.seed)
            members = mix_parts(listed, sharding, generator) if column else _permuted(members, generator)
        tasks += [
            ShardTask(
                folder=sharding.folder,
                split=split,
                number=number,
                members=group,
                column=column,
                shrinking=sharding.shrinking,
            )
            for number, group in enumerate(cut_shards(members, sharding.shard_bytes, sharding.shard_samples))
        ]
    return tasks


def mix_parts(
    parts: Sequence[Sequence[ImageFile]], sharding: ShardRequest, generator: np.random.Generator
) -> list[ImageFile]:
    """The images of all parts, shuffled so that a shard holds images of few parts only: each that it does is read as a
    whole for it. The parts are shuffled, and then the images among the parts that make :data:`_MIXED_SHARDS` shards.
    """
    mixed: list[ImageFile] = []
    window: list[ImageFile] = []
    filled = 0
    for part in _permuted(parts, generator):
        window += part
        filled += len(part) if sharding.shard_samples else sum(tar_bytes(image.size, image.label) for image in part)
        if filled >= _MIXED_SHARDS * (sharding.shard_samples or sharding.shard_bytes or 0):
            mixed += _permuted(window, generator)
            window, filled = [], 0
    return mixed + _permuted(window, generator)


def _permuted(items: Sequence[_Item], generator: np.random.Generator) -> list[_Item]:
    return [items[index] for index in generator.permutation(len(items))]


def cut_shards(
    members: Iterable[ImageFile], most_bytes: int | None, most_samples: int | None
) -> list[tuple[ImageFile, ...]]:
    """Divide the members, in order, into groups of at most so many bytes per tar or so many samples."""
    groups: list[list[ImageFile]] = []
    filled = 0
    for member in members:
        size = tar_bytes(member.size, member.label)
        full = (most_bytes is not None and filled + size > most_bytes) or (
            most_samples is not None and bool(groups) and len(groups[-1]) == most_samples
        )
        if not groups or full:
            groups.append([])
            filled = 0
        groups[-1].append(member)
        filled += size
    return [tuple(group) for group in groups]


def command(settings: ShardSettings, folder: Path) -> str:
    """The command that makes or completes a folder."""
    size, smaller, usual = settings.shard_bytes, settings.shrinking, Columns()
    return data_command(
        "shard",
        settings.source,
        folder,
        shard_samples=settings.shard_samples,
        shard_mb=None if size is None else f"{size / (1 << 20):.17g}",
        seed=settings.seed,
        image_column=settings.image_column if settings.image_column != usual.image else None,
        label_column=settings.label_column if settings.label_column != usual.label else None,
        short_side=smaller.short_side if smaller else None,
        quality=smaller.quality if smaller else None,
        validation_share=settings.validation_share,
    )


def _require_room(folder: Path, tasks: Iterable[ShardTask]) -> None:
    missing = [task for task in tasks if not task.path.exists()]
    wanted = sum(tar_bytes(member.size, member.label) for task in missing for member in task.members)
    require_room(folder, wanted, "written", "free some space there, or choose another folder")


def _finish(
    folder: Path,
    classes: tuple[str, ...],
    settings: ShardSettings,
    made: Sequence[tuple[ShardTask, ShardRecord]],
) -> ShardManifest:
    splits: dict[SplitName, Split] = {}
    broken: list[BrokenImage] = []
    for split in dict.fromkeys(task.split for task, _ in made):
        done = [record for task, record in made if task.split == split]
        buffer = io.BytesIO()
        index = np.concatenate([record.index(number) for number, record in enumerate(done)])
        np.save(buffer, index, allow_pickle=False)
        write_whole(folder / index_name(split), buffer.getvalue())
        files = tuple(record.shard for record in done)
        splits[split] = Split(
            samples=sum(file.samples for file in files),
            bytes=sum(file.bytes for file in files),
            index_sha256=hashlib.sha256(buffer.getvalue()).hexdigest(),
            shards=files,
        )
        broken += [image for record in done for image in record.broken]
    manifest = ShardManifest(classes=classes, splits=splits, broken=tuple(broken), settings=settings)
    write_model(folder / MANIFEST, manifest)
    return manifest

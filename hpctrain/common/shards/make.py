"""Makes shards of images, with the same bytes for any number of processes."""

from __future__ import annotations

import hashlib
import io
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error, require_empty
from hpctrain.common.files.locks import locked
from hpctrain.common.files.printable import shell_word
from hpctrain.common.files.whole import remove_leftovers, require_room, write_whole
from hpctrain.common.frozen import FrozenModel
from hpctrain.common.run.directory import read_model
from hpctrain.common.shards.archives import find_source
from hpctrain.common.shards.listing import ImageFile, list_part, require_distinct
from hpctrain.common.shards.manifest import (
    MANIFEST,
    SETTINGS,
    BrokenImage,
    ShardManifest,
    ShardSettings,
    Shrinking,
    Split,
    SplitName,
)
from hpctrain.common.shards.one_shard import RECORDS, ShardTask, make_shard, read_record, tar_bytes
from hpctrain.common.shards.parquet import Columns
from hpctrain.common.shards.processes import Map
from hpctrain.common.shards.read import index_path

_Item = TypeVar("_Item")
# Images of Parquet files are mixed over this many shards; each shard reads that much for it.
_MIXED_SHARDS = 8


class ShardRequest(FrozenModel):
    """The source and settings of shards; exactly one of ``shard_bytes`` and ``shard_samples`` is set."""

    source: Path
    folder: Path
    seed: int = Field(0, ge=0)
    shard_bytes: int | None = Field(None, ge=1)
    shard_samples: int | None = Field(None, ge=1)
    image_column: str = "image"
    label_column: str = "label"
    shrinking: Shrinking | None = None
    validation_share: float | None = Field(None, gt=0, lt=1)


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
    splits = {split: list(chain.from_iterable(own)) for split, own in parts.items()}
    say(f"{sharding.source}: " + ", ".join(f"{len(found)} images in {split}" for split, found in splits.items()))
    if source.validation == "test":
        say("the test set validates, for lack of another")
    settings = ShardSettings(
        **sharding.model_dump(exclude={"source", "folder"}),
        source=str(sharding.source.absolute()),
        listing=listing_digest(splits),
    )
    tasks = plan_shards(sharding, source.columns, parts)
    # The process that hands out the work holds the lock, since it may outlive the one that started it.
    with locked(sharding.folder, seconds=0):
        _begin(sharding.folder, settings)
        _require_room(sharding.folder, tasks)
        _work(tasks, run, say)
        # Left by executors that were killed while the others went on.
        for place in (sharding.folder, sharding.folder / RECORDS):
            remove_leftovers(place)
        return _finish(sharding.folder, source.classes or _numbered(splits), settings, tasks)


def _numbered(splits: Mapping[SplitName, Sequence[ImageFile]]) -> tuple[str, ...]:
    """The classes of images that have a class number only.

    Raises:
        HpctrainError: a class is in val alone: the two are numbered from 0 and from 1.
    """
    trained, validated = ({image.label for image in splits[split]} for split in ("train", "val"))
    if others := sorted(validated - trained):
        raise HpctrainError(
            "HT-webdataset-class-only-in-val",
            "the class {label} is in val and not in train",
            "number the classes of both alike, from 0",
            label=others[0],
        )
    return tuple(map(str, range(max(trained) + 1)))


def list_images(source: Path, split: SplitName, parts: Sequence[Any], run: Map) -> list[list[ImageFile]]:
    """The images of each part of a split.

    Raises:
        HpctrainError: there are none, two have one name, or a part cannot be read.
    """
    found = list(run(list_part, parts))
    members = list(chain.from_iterable(found))
    if not members:
        raise HpctrainError(
            "HT-source-lacks-split",
            "{source} has no image in {split}",
            "both train and val need some",
            source=source,
            split=split,
        )
    require_distinct(members)
    return found


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
    found: dict[SplitName, list[list[ImageFile]]] = {"train": [], "val": []}
    for name, members in zip(classes, parts, strict=True):
        numbers = [drawn(member.key) for member in members]
        limit = min(max(math.ceil(share * 2**64), min(numbers) + 1), max(numbers))
        chosen = [number < limit for number in numbers]
        found["train"].append([member for member, held in zip(members, chosen, strict=True) if not held])
        found["val"].append([member for member, held in zip(members, chosen, strict=True) if held])
        for split, own in found.items():
            if not own[-1]:
                raise HpctrainError(
                    "HT-source-class-not-divisible",
                    "{folder} has one image, which leaves none for {split}",
                    "add another image, or leave the class out",
                    folder=source / name,
                    split=split,
                )
    return found


def listing_digest(splits: Mapping[SplitName, Iterable[ImageFile]]) -> str:
    """A digest that identifies a source independently of place and packing: keys, sizes and labels of its images."""
    digest = hashlib.sha256()
    for split, members in splits.items():
        for member in members:
            digest.update(f"{split} {member.key} {member.size} {member.label}\n".encode())
    return digest.hexdigest()


def plan_shards(
    sharding: ShardRequest, columns: Columns | None, parts: Mapping[SplitName, Sequence[Sequence[ImageFile]]]
) -> list[ShardTask]:
    """Which images each shard holds: those of training shuffled by the seed, so that each shard mixes the classes, and
    those of validation as they are listed. ``columns`` are those of Parquet files.
    """
    tasks = []
    for split, own in parts.items():
        members = list(chain.from_iterable(own))
        if split == "train":
            generator = np.random.default_rng(sharding.seed)
            members = mix_parts(own, sharding, generator) if columns else _permuted(members, generator)
        tasks += [
            ShardTask(
                folder=sharding.folder,
                split=split,
                number=number,
                members=group,
                column=columns.image if columns else None,
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
        filled += len(part) if sharding.shard_samples else sum(tar_bytes(each.size, each.label) for each in part)
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
    size = (
        f"--shard-samples {settings.shard_samples}"
        if settings.shard_samples
        else f"--shard-mb {(settings.shard_bytes or 0) / (1 << 20):.17g}"
    )
    columns = "".join(
        f" {option} {quote(name)}"
        for option, name, default in (
            ("--image-column", settings.image_column, Columns.image),
            ("--label-column", settings.label_column, Columns.label),
        )
        if name != default
    )
    smaller = settings.shrinking
    shrinking = f" --short-side {smaller.short_side} --quality {smaller.quality}" if smaller else ""
    share = settings.validation_share
    divided = "" if share is None else f" --validation-share {share!r}"
    return (
        f"hpctrain data shard {shell_word(settings.source)} {shell_word(folder)} {size} --seed {settings.seed}"
        f"{columns}{shrinking}{divided}"
    )


def _begin(folder: Path, wanted: ShardSettings) -> None:
    """Make the folder for these settings, or go on with it."""
    path = folder / SETTINGS
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            require_empty(folder)
            write_whole(path, (wanted.model_dump_json(indent=2) + "\n").encode())
        (folder / RECORDS).mkdir(exist_ok=True)
        begun = read_model(path, ShardSettings, links=True)
        if begun != wanted:
            _require_same(folder, begun, wanted)
            # The same images have moved.
            write_whole(path, (wanted.model_dump_json(indent=2) + "\n").encode())
        for place in (folder, folder / RECORDS):
            remove_leftovers(place)
    except OSError as error:
        raise disk_error(error, folder, "choose another folder") from error


def _require_same(folder: Path, begun: ShardSettings, wanted: ShardSettings) -> None:
    names = [name for name in ShardSettings.model_fields if getattr(begun, name) != getattr(wanted, name)]
    if set(names) <= {"source"}:
        return
    what = "images" if "listing" in names else " and ".join(names)
    raise HpctrainError(
        "HT-shards-begun-otherwise",
        "{folder} was begun with another source or other settings: {settings} differ",
        f"{command(begun, folder)} goes on with it; choose another folder for this one, or remove that one",
        folder=folder,
        settings=what,
    )


def _require_room(folder: Path, tasks: Iterable[ShardTask]) -> None:
    missing = [task for task in tasks if not task.path.exists()]
    wanted = sum(tar_bytes(member.size, member.label) for task in missing for member in task.members)
    require_room(folder, wanted, "written", "free some space there, or choose another folder")


def _work(tasks: Sequence[ShardTask], run: Map, say: Callable[[str], None]) -> None:
    made = 0
    # Progress is said after each tenth of the shards.
    lines = {len(tasks) * tenth // 10 for tenth in range(1, 11)}
    for number, fresh in enumerate(run(make_shard, tasks), 1):
        made += fresh
        if number in lines:
            say(f"{number} of {len(tasks)} shards are done, {made} of them made now")


def _finish(
    folder: Path, classes: tuple[str, ...], settings: ShardSettings, tasks: Sequence[ShardTask]
) -> ShardManifest:
    splits: dict[SplitName, Split] = {}
    broken: list[BrokenImage] = []
    for split in dict.fromkeys(task.split for task in tasks):
        own = [task for task in tasks if task.split == split]
        records = [record for task in own if (record := read_record(task))]
        if len(records) < len(own):
            raise HpctrainError(
                "HT-shards-records-missing",
                "{path} lacks {missing} of {count} shards of {split} that were made",
                f"do all hosts see {folder} as the same folder? then {command(settings, folder)} makes them",
                exit_code=1,
                path=folder / RECORDS,
                missing=len(own) - len(records),
                count=len(own),
                split=split,
            )
        content = _npy(np.concatenate([record.index(number) for number, record in enumerate(records)]))
        write_whole(index_path(folder, split), content)
        files = tuple(record.shard for record in records)
        splits[split] = Split(
            samples=sum(file.samples for file in files),
            bytes=sum(file.bytes for file in files),
            index_sha256=hashlib.sha256(content).hexdigest(),
            shards=files,
        )
        broken += [image for record in records for image in record.broken]
    manifest = ShardManifest(classes=classes, splits=splits, broken=tuple(broken), settings=settings)
    write_whole(folder / MANIFEST, (manifest.model_dump_json(indent=2) + "\n").encode())
    return manifest


def _npy(array: NDArray[np.void]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()

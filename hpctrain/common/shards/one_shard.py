"""Makes one shard, and a record of its completion."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.files.disk import reading
from hpctrain.common.files.regular import open_regular
from hpctrain.common.files.whole import write_whole
from hpctrain.common.frozen import FrozenModel
from hpctrain.common.shards.decoding import BrokenImageError, fault, shrunk
from hpctrain.common.shards.listing import ImageFile
from hpctrain.common.shards.manifest import INDEX_ROW, BrokenImage, ShardFile, Shrinking, SplitName, wrong_source
from hpctrain.common.shards.parquet import read_rows
from hpctrain.common.shards.resumable import RECORDS, all_there, read_record

# The limit for a record, in which an image takes about 80 bytes.
_MOST_RECORD_BYTES = 1 << 28


class ShardRecord(FrozenModel):
    """``DIR/records/NAME.json``: a shard that is done; ``rows`` are offset, size, label and key of each sample."""

    shard: ShardFile
    rows: tuple[tuple[int, int, int, str], ...]
    broken: tuple[BrokenImage, ...]

    def index(self, shard: int) -> NDArray[np.void]:
        """The shard's rows of the index, as shard number ``shard`` of the split."""
        return np.array(
            [(shard, offset, size, label, key.encode()) for offset, size, label, key in self.rows], INDEX_ROW
        )


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """The settings of one shard; it is sent to other processes.

    ``column`` is that of the images where they are in Parquet files; None where they are in others.
    """

    folder: Path
    split: SplitName
    number: int
    members: tuple[ImageFile, ...]
    column: str | None = None
    shrinking: Shrinking | None = None

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:06}.tar"

    @property
    def path(self) -> Path:
        return self.folder / self.name

    def record(self) -> ShardRecord | None:
        """The record of the shard; None if there is no valid one, or one of other images."""
        record = read_record(_record_path(self), ShardRecord, _MOST_RECORD_BYTES)
        # Of photographs that are made smaller, the sizes are known afterwards only.
        first = 2 if self.shrinking else 1
        wanted = [(member.size, member.label, member.key)[first - 1 :] for member in self.members]
        same = record and record.shard.name == self.name and [row[first:] for row in record.rows] == wanted
        return record if same else None


def _record_path(task: ShardTask) -> Path:
    return task.folder / RECORDS / f"{task.name}.json"


def tar_bytes(size: int, label: int) -> int:
    """The size of a sample in a shard: a header and whole blocks each for the image and its label."""
    return sum(
        tarfile.BLOCKSIZE + -(-part // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE for part in (size, len(str(label)))
    )


def make_shard(task: ShardTask) -> tuple[ShardRecord, bool]:
    """Make a shard unless it is complete and undamaged. Its bytes depend on the task alone.

    Returns:
        Its record, and whether it had to be made.

    Raises:
        HpctrainError: an image cannot be read where it was listed, or the disk is full.
    """
    if (done := task.record()) and all_there(task.folder, [done.shard.stored]):
        return done, False
    contents = _contents(task.members, task.column)
    broken = []
    for member in task.members:
        contents[member], message = _checked(task.shrinking, contents[member])
        if message:
            broken.append(BrokenImage(split=task.split, key=member.key, message=message))
    content, rows = _tar(task.members, contents)
    digest = hashlib.sha256(content).hexdigest()
    shard = ShardFile(name=task.name, samples=len(rows), bytes=len(content), sha256=digest)
    record = ShardRecord(shard=shard, rows=tuple(rows), broken=tuple(broken))
    write_whole(task.path, content)
    write_whole(_record_path(task), json.dumps(record.model_dump(mode="json")).encode())
    return record, True


def _checked(smaller: Shrinking | None, content: bytes) -> tuple[bytes, str | None]:
    """An image as the shard has it, and why it cannot be decoded; None if it can."""
    if smaller is None:
        return content, fault(content)
    try:
        return shrunk(content, smaller.short_side, smaller.quality), None
    except BrokenImageError as error:
        return content, str(error)


def _contents(members: Sequence[ImageFile], column: str | None) -> dict[ImageFile, bytes]:
    """The images, read in the order in which they lie on disk."""
    contents = dict.fromkeys(members, b"")
    for name, group in groupby(sorted(members), key=lambda member: member.file):
        by_offset = {member.offset: member for member in group}
        if column is not None:
            contents |= {by_offset[row]: content for row, content in read_rows(Path(name), column, list(by_offset))}
            continue
        with reading(name, "is the source still there?"), open_regular(Path(name)) as file:
            contents |= {member: os.pread(file.fileno(), member.size, at) for at, member in by_offset.items()}
    for member, content in contents.items():
        if len(content) != member.size:
            problem = f"{member.key} has {len(content)} bytes of the {member.size} that were listed"
            raise wrong_source(member.file, problem, "the source changed meanwhile: begin again with it as it is now")
    return contents


def _tar(
    members: Sequence[ImageFile], contents: dict[ImageFile, bytes]
) -> tuple[bytes, list[tuple[int, int, int, str]]]:
    """A shard's bytes, and offset, size, label and key of each image."""
    buffer = io.BytesIO()
    rows = []
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for member in members:
            _add(tar, f"{member.key}.cls", str(member.label).encode())
            offset = tar.offset + tarfile.BLOCKSIZE
            _add(tar, f"{member.key}.jpg", contents[member])
            rows.append((offset, len(contents[member]), member.label, member.key))
    return buffer.getvalue(), rows


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    # Owner and time are those of TarInfo itself, root and 1970, so that the same images make the same bytes.
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))

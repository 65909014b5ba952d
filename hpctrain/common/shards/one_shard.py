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
from pydantic import ValidationError

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import reading
from hpctrain.common.files.regular import open_descriptor, read_regular, sha256
from hpctrain.common.files.whole import write_whole
from hpctrain.common.frozen import FrozenModel
from hpctrain.common.shards.decoding import BrokenImageError, fault, shrunk
from hpctrain.common.shards.listing import ImageFile
from hpctrain.common.shards.manifest import INDEX_ROW, BrokenImage, ShardFile, Shrinking, SplitName
from hpctrain.common.shards.parquet import read_rows

RECORDS = "records"
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

    def is_of(self, task: ShardTask) -> bool:
        """Whether the record describes a task's shard and images, and not others with the same name."""
        # Of photographs that are made smaller, the sizes are known afterwards only.
        first = 2 if task.shrinking else 1
        return self.shard.name == task.name and [row[first:] for row in self.rows] == [
            (member.size, member.label, member.key)[first - 1 :] for member in task.members
        ]


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

    @property
    def record(self) -> Path:
        return self.folder / RECORDS / f"{self.name}.json"


def tar_bytes(size: int, label: int) -> int:
    """The size of a sample in a shard: a header and whole blocks each for the image and its label."""
    return sum(
        tarfile.BLOCKSIZE + -(-part // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE for part in (size, len(str(label)))
    )


def make_shard(task: ShardTask) -> bool:
    """Make a shard unless it is complete and undamaged. Its bytes depend on the task alone.

    Returns:
        Whether it had to be made.

    Raises:
        HpctrainError: an image cannot be read where it was listed, or the disk is full.
    """
    if is_done(task):
        return False
    contents = _contents(task.members, task.column)
    messages = {}
    for member in task.members:
        contents[member], messages[member] = _checked(task, contents[member])
    content, rows = _tar(task.members, contents)
    digest = hashlib.sha256(content).hexdigest()
    record = ShardRecord(
        shard=ShardFile(name=task.name, samples=len(rows), bytes=len(content), sha256=digest),
        rows=tuple(rows),
        broken=tuple(
            BrokenImage(split=task.split, key=member.key, message=message)
            for member in task.members
            if (message := messages[member])
        ),
    )
    write_whole(task.path, content)
    write_whole(task.record, json.dumps(record.model_dump(mode="json")).encode())
    return True


def _checked(task: ShardTask, content: bytes) -> tuple[bytes, str | None]:
    """An image as the shard has it, and why it cannot be decoded; None if it can."""
    if task.shrinking is None:
        return content, fault(content)
    try:
        return shrunk(content, task.shrinking.short_side, task.shrinking.quality), None
    except BrokenImageError as error:
        return content, str(error)


def read_record(task: ShardTask) -> ShardRecord | None:
    """The record of a shard; None if there is no valid one."""
    try:
        return ShardRecord.model_validate_json(read_regular(task.record, _MOST_RECORD_BYTES))
    except (OSError, ValidationError):
        return None


def is_done(task: ShardTask) -> bool:
    """Whether a shard with these images is there, with the bytes that were written."""
    record = read_record(task)
    if record is None or not record.is_of(task):
        return False
    try:
        size = task.path.stat().st_size
        return size == record.shard.bytes and sha256(task.path) == (record.shard.sha256, size)
    except OSError:
        return False


def _contents(members: Sequence[ImageFile], column: str | None) -> dict[ImageFile, bytes]:
    """The images, read in the order in which they lie on disk."""
    contents = dict.fromkeys(members, b"")
    for name, group in groupby(sorted(members), key=lambda member: member.file):
        if column is None:
            contents |= _of_file(Path(name), list(group))
        else:
            own = {member.offset: member for member in group}
            contents |= {own[row]: content for row, content in read_rows(Path(name), column, list(own))}
    for member, content in contents.items():
        if len(content) != member.size:
            raise HpctrainError(
                "HT-image-cut-short",
                "{file}: {key} has {found} bytes of the {size} that were listed",
                "the source changed meanwhile: begin again with it as it is now",
                file=member.file,
                key=member.key,
                found=len(content),
                size=member.size,
            )
    return contents


def _of_file(path: Path, members: Sequence[ImageFile]) -> dict[ImageFile, bytes]:
    with reading(path, "is the source still there?"):
        file = open_descriptor(path, os.O_RDONLY, links=True)
        try:
            return {member: os.pread(file, member.size, member.offset) for member in members}
        finally:
            os.close(file)


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

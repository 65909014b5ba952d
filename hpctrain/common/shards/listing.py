"""Lists the images of a source."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from hpctrain.common.files.disk import read_error
from hpctrain.common.files.printable import encodable
from hpctrain.common.shards.decoding import MOST_BYTES
from hpctrain.common.shards.manifest import INDEX_ROW, wrong_source

_KEY_BYTES = INDEX_ROW["key"].itemsize
_HASH_DIGITS = 12
_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")
# What Windows, macOS and network storage leave in folders of images, in lower case.
_CLUTTER = frozenset(("thumbs.db", "desktop.ini", "@eadir", "__macosx"))


class ImageFile(NamedTuple):
    """One image: its bytes in a file, its label, and its name in the shards.

    ``offset`` is that of its first byte; in a Parquet file it is the number of its row.
    """

    file: str
    offset: int
    size: int
    label: int
    key: str


class SourcePart(Protocol):
    """The part that one process lists at a time; it is sent to other processes."""

    def members(self) -> list[ImageFile]: ...


@dataclass(frozen=True, kw_only=True)
class ClassFolder:
    """A folder of images of one class."""

    folder: Path
    label: int

    def members(self) -> list[ImageFile]:
        """The images, sorted by name.

        Raises:
            HpctrainError: it holds what is no image, or nothing.
        """
        images = []
        for path in sorted(self.folder.iterdir()):
            if is_clutter(path.name):
                continue
            if path.suffix.lower() not in _SUFFIXES or not path.is_file():
                problem = f"is not an image ({', '.join(_SUFFIXES)})"
                raise wrong_source(path, problem, "move it out of the folder of images")
            size = path.stat().st_size
            require_size(str(path), size)
            images.append(ImageFile(str(path), 0, size, self.label, self._key(path)))
        if not images:
            raise wrong_source(self.folder, "holds no image", "each class needs some, in train/ and in val/")
        return images

    def _key(self, path: Path) -> str:
        # WebDataset takes all after the first dot for the ending, and images of different classes can have one name.
        stem, wnid = (name.replace(".", "_") for name in (path.stem, self.folder.name))
        return short_key(stem if stem.startswith((f"{wnid}_", "ILSVRC2012_val_")) else f"{wnid}_{stem}")


def is_clutter(name: str) -> bool:
    """Whether a file or folder among the images is hidden, or one that a system made for itself."""
    return name.startswith(".") or name.lower() in _CLUTTER


def short_key(name: str, most: int = _KEY_BYTES) -> str:
    """The name; one of more bytes than ``most`` ends in digits of its hash."""
    content = os.fsencode(name)
    if len(content) <= most:
        return name
    digits = hashlib.sha256(content).hexdigest()[:_HASH_DIGITS]
    return content[: most - _HASH_DIGITS - 1].decode(errors="ignore") + f"-{digits}"


def require_size(where: str, size: int) -> None:
    """Refuse a file that is too large for a photograph, before it is read.

    Raises:
        HpctrainError: it is.
    """
    if size > MOST_BYTES:
        problem = f"{size} bytes, but a photograph has at most {MOST_BYTES}"
        raise wrong_source(where, problem, "leave it out, or make it smaller")


def list_part(part: SourcePart) -> list[ImageFile]:
    """:meth:`SourcePart.members` as a function for other processes.

    Raises:
        HpctrainError: the part cannot be listed, or a file of it cannot be read.
    """
    try:
        return part.members()
    except OSError as error:
        raise read_error(error, error.filename, "make it readable", exit_code=1) from error


def require_distinct(images: Iterable[ImageFile]) -> None:
    """Refuse names that cannot be stored in shards.

    Raises:
        HpctrainError: two images have one name, or a name is no UTF-8.
    """
    files: dict[str, str] = {}
    for image in images:
        if encodable(image.key) != image.key:
            raise wrong_source(image.file, f"an image has the name {image.key!a}, which is not UTF-8", "rename it")
        if image.key in files:
            problem = f"2 images have the name {image.key}, as in {image.file}"
            raise wrong_source(files[image.key], problem, "rename one of them")
        files[image.key] = image.file

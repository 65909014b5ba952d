"""Lists the images of a source in its folders or tars, without unpacking them."""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol

from hpctrain.common.files.disk import read_error
from hpctrain.common.files.regular import open_regular
from hpctrain.common.shards.decoding import MOST_BYTES
from hpctrain.common.shards.manifest import INDEX_ROW, wrong_source

_KEY_BYTES = INDEX_ROW["key"].itemsize
_HASH_DIGITS = 12
# The longest header of a tar's member with its extensions, in bytes.
_LONGEST_HEADER = 1 << 20
IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")
# What Windows, macOS and network storage leave in folders of images, in lower case.
_CLUTTER = frozenset(("thumbs.db", "desktop.ini", "@eadir", "__macosx"))
# The most digits of a class number in a shard of other programs.
_MOST_DIGITS = 9


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
class WebDatasetTar:
    """A shard in WebDataset's format that another program made: of each image KEY.jpg, and its class number in KEY.cls.

    Format: https://github.com/webdataset/webdataset; all before a name's first dot is the key.
    """

    archive: Path

    def members(self) -> list[ImageFile]:
        """The images, in the order of their names in the tar.

        Raises:
            HpctrainError: cut short, damaged, or with samples that are not an image and its class number.
        """
        samples: dict[str, dict[str, tarfile.TarInfo]] = {}
        for file in tar_files(self.archive):
            path = PurePosixPath(file.name)
            key, _, ending = path.name.partition(".")
            samples.setdefault(str(path.parent / key), {})[f".{ending.lower()}"] = file
        with open_regular(self.archive) as tar:
            return [self._image(tar.fileno(), key, files) for key, files in samples.items()]

    def _image(self, tar: int, key: str, files: dict[str, tarfile.TarInfo]) -> ImageFile:
        image = next((file for ending, file in files.items() if ending in IMAGE_SUFFIXES), None)
        label = b""
        if (number := files.get(".cls")) and number.size <= _MOST_DIGITS:
            label = os.pread(tar, number.size, number.offset_data).strip()
        if image is None or not re.fullmatch(b"[0-9]+", label):
            raise wrong_source(
                self.archive,
                f"{key} is not an image and its class number ({', '.join(sorted(files))})",
                f"each sample has KEY{' or KEY'.join(IMAGE_SUFFIXES)}, and the number of its class in KEY.cls; unpack "
                "ImageNet's archives into train/CLASS/ and val/CLASS/",
            )
        # Keys are often numbers that begin anew in each shard.
        name = re.sub(r"[./]", "_", f"{self.archive.stem}_{key}")
        require_size(f"{self.archive}: {image.name}", image.size)
        return ImageFile(str(self.archive), image.offset_data, image.size, int(label), short_key(name))


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
            if path.suffix.lower() not in IMAGE_SUFFIXES or not path.is_file():
                problem = f"is not an image ({', '.join(IMAGE_SUFFIXES)})"
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
        HpctrainError: two images have one name, or a name is too long, no UTF-8, or not taken whole by WebDataset.
    """
    keys: Counter[str] = Counter()
    for image in images:
        keys[image.key] += 1
        if fault := _fault(image.key):
            raise wrong_source(image.file, f"an image has the name {image.key!a}, {fault}", "give it another name")
    for key, count in keys.most_common(1):
        if count > 1:
            files = [image.file for image in images if image.key == key]
            raise wrong_source(files[0], f"{count} images have the name {key}, as in {files[1]}", "rename all but one")


def _fault(key: str) -> str | None:
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return "which is not UTF-8"
    if not 1 <= size <= _KEY_BYTES:
        return f"which is not 1 to {_KEY_BYTES} bytes long"
    return "whose part after the dot WebDataset takes for the extension" if "." in key else None


def tar_files(path: Path) -> list[tarfile.TarInfo]:
    """The files in a tar, after checking that its end is there. Reads headers alone.

    Links, folders and devices are no images: they are missing where a sample needs them.

    Raises:
        HpctrainError: it cannot be read, is no tar file, is cut short or damaged, or has a file with holes.
    """
    again = "download or write it again"
    try:
        with (
            open_regular(path) as file,
            _Headers(file.fileno(), closefd=False) as headers,
            tarfile.open(fileobj=headers, mode="r:") as tar,
        ):
            members = tar.getmembers()
            # tarfile takes a damaged header, and the end of the file, for the end of the archive.
            headers.seek(tar.offset)
            end = headers.read(tarfile.BLOCKSIZE)
    except OSError as error:
        raise read_error(error, path, "make it readable") from error
    # For numbers in headers, and for a thousand extended headers in a row, tarfile raises other errors than its own.
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise wrong_source(path, f"no tar file, cut short or damaged: {error}", again) from error
    if len(end) < tarfile.BLOCKSIZE or end.strip(b"\0"):
        raise wrong_source(path, f"cut short or damaged at byte {tar.offset}", again)
    # Its bytes are not those that lie after its header.
    if sparse := next((file.name for file in members if file.issparse()), None):
        raise wrong_source(path, f"{sparse} is a sparse file", again)
    return [file for file in members if file.isfile()]


class _Headers(io.FileIO):
    """A file through which tarfile reads the headers of a tar, without a buffer, which would be filled with images."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _LONGEST_HEADER:
            raise tarfile.ReadError(f"a header has more than {_LONGEST_HEADER} bytes")
        return super().read(size) or b""

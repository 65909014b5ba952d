"""Lists the images of a source in its archives or folders, without unpacking them."""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple, Protocol, cast

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import read_error
from hpctrain.common.files.regular import open_regular
from hpctrain.common.shards.decoding import MOST_BYTES
from hpctrain.common.shards.manifest import INDEX_ROW

_KEY_BYTES = INDEX_ROW["key"].itemsize
_HASH_DIGITS = 12
# The longest header of a tar's member with its extensions, in bytes.
_LONGEST_HEADER = 1 << 20
IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")
# What Windows, macOS and network storage leave in folders of images, in lower case.
_CLUTTER = frozenset(("thumbs.db", "desktop.ini", "@eadir", "__macosx"))
# The most digits of a class number in a shard of other programs.
_MOST_DIGITS = 9


def wrong_source(path: Path | str, problem: str, hint: str) -> HpctrainError:
    """The error for a source whose files or folders are not as they have to be."""
    return HpctrainError("HT-source-wrong", "{path}: {problem}", hint, path=path, problem=problem)


def wrong_archive(where: Path | str, problem: str) -> HpctrainError:
    """The error for an archive that is damaged, or holds something else than its name says."""
    return HpctrainError("HT-archive-damaged", "{where}: {problem}", "download it again", where=where, problem=problem)


class ImageFile(NamedTuple):
    """One image: its bytes in a file, its label, and its name in the shards.

    ``offset`` is that of its first byte; in a Parquet file it is the number of its row.
    """

    file: str
    offset: int
    size: int
    label: int
    key: str


class ArchivePart(Protocol):
    """The part that one process lists at a time; it is sent to other processes."""

    def members(self) -> list[ImageFile]: ...


@dataclass(frozen=True, kw_only=True)
class ClassTar:
    """A class's tar inside the training archive."""

    archive: Path
    info: tarfile.TarInfo
    label: int

    def members(self) -> list[ImageFile]:
        """The images, sorted by name.

        Raises:
            HpctrainError: cut short, or damaged.
        """
        files = tar_files(self.archive, self.info)
        where = f"{self.archive}: {self.info.name}"
        begin = self.info.offset_data
        images = [_in_tar(where, self.archive, file, self.label, _stem(file.name), begin) for file in files]
        return sorted(images, key=lambda image: image.key)


@dataclass(frozen=True, kw_only=True)
class ValidationTar:
    """The validation archive, and the labels of its images in the order of their names."""

    archive: Path
    labels: tuple[int, ...]

    def members(self) -> list[ImageFile]:
        """The images, sorted by name.

        Raises:
            HpctrainError: cut short, damaged, or other images than those that have labels.
        """
        files = sorted(tar_files(self.archive), key=lambda file: _stem(file.name))
        if len(files) != len(self.labels):
            raise wrong_archive(self.archive, f"{len(files)} images, where the devkit has {len(self.labels)}")
        images = []
        for number, (file, label) in enumerate(zip(files, self.labels, strict=True), 1):
            key = f"ILSVRC2012_val_{number:08}"
            if _stem(file.name) != key:
                problem = f"{file.name} is in the place of {key}.JPEG, so labels would be wrong"
                raise wrong_archive(self.archive, problem)
            images.append(_in_tar(self.archive, self.archive, file, label, key))
        return images


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
                f"each sample has KEY{' or KEY'.join(IMAGE_SUFFIXES)}, and the number of its class in KEY.cls",
            )
        # Keys are often numbers that begin anew in each shard.
        name = re.sub(r"[./]", "_", f"{self.archive.stem}_{key}")
        return _in_tar(self.archive, self.archive, image, int(label), short_key(name))


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


def list_part(part: ArchivePart) -> list[ImageFile]:
    """:meth:`ArchivePart.members` as a function for other processes.

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


def tar_files(path: Path, member: tarfile.TarInfo | None = None) -> list[tarfile.TarInfo]:
    """The files in a tar, or in one that is a member of it, after checking that its end is there. Reads headers alone.

    Links, folders and devices are no images: they are missing where the numbers of images are compared.

    Raises:
        HpctrainError: it cannot be read, is no tar file, is cut short or damaged, or has a file with holes.
    """
    where = f"{path}: {member.name}" if member else path
    try:
        with open_regular(path) as file:
            headers = cast("IO[bytes]", _Headers(file.fileno(), member))
            with tarfile.open(fileobj=headers, mode="r:") as tar:
                members = tar.getmembers()
                # tarfile takes a damaged header, and the end of the file, for the end of the archive.
                headers.seek(tar.offset)
                end = headers.read(tarfile.BLOCKSIZE)
    except OSError as error:
        raise read_error(error, path, "name the folder that holds the archives") from error
    # For numbers in headers, and for a thousand extended headers in a row, tarfile raises other errors than its own.
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise wrong_archive(where, f"no tar file, cut short or damaged: {error}") from error
    if len(end) < tarfile.BLOCKSIZE or end.strip(b"\0"):
        raise wrong_archive(where, f"cut short or damaged at byte {tar.offset}")
    # Its bytes are not those that lie after its header.
    if sparse := next((file.name for file in members if file.issparse()), None):
        raise wrong_archive(where, f"{sparse} is a sparse file")
    return [file for file in members if file.isfile()]


class _Headers:
    """A file through which tarfile reads the headers of a tar, without a buffer, which would be filled with images."""

    def __init__(self, file: int, member: tarfile.TarInfo | None) -> None:
        self._file = file
        self._begin = member.offset_data if member else 0
        self._size = member.size if member else os.fstat(file).st_size
        self._place = 0

    def seek(self, place: int) -> None:
        self._place = place

    def tell(self) -> int:
        return self._place

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _LONGEST_HEADER:
            raise tarfile.ReadError(f"a header has more than {_LONGEST_HEADER} bytes")
        content = os.pread(self._file, max(0, min(size, self._size - self._place)), self._begin + self._place)
        self._place += len(content)
        return content


def _in_tar(where: Path | str, archive: Path, file: tarfile.TarInfo, label: int, key: str, begin: int = 0) -> ImageFile:
    """The image that is a file of a tar which begins at a byte of the archive."""
    require_size(f"{where}: {file.name}", file.size)
    return ImageFile(str(archive), begin + file.offset_data, file.size, label, key)


def _stem(name: str) -> str:
    return re.sub(r"\.[A-Za-z]+$", "", PurePosixPath(name).name)

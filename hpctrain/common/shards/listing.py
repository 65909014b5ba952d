"""Lists the images of a source in its archives or folders, without unpacking them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple, Protocol, cast

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import read_error
from hpctrain.common.files.regular import open_regular
from hpctrain.common.shards.decoding import MOST_BYTES
from hpctrain.common.shards.manifest import INDEX_ROW

DOWNLOAD_AGAIN = "download it again, and compare it with --checksums"
# What tarfile raises: for numbers in headers, and for a thousand extended headers in a row, other errors than its own.
_DAMAGE = (tarfile.TarError, ValueError, OverflowError, RecursionError)
_KEY_BYTES = INDEX_ROW["key"].itemsize
_HASH_DIGITS = 12
# The longest header of a tar's member with its extensions, in bytes.
_LONGEST_HEADER = 1 << 20
IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")
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


class ArchivePart(Protocol):
    """The part that one process lists at a time; it is sent to other processes."""

    def members(self) -> list[ImageFile]: ...


@dataclass(frozen=True, kw_only=True)
class ClassTar:
    """A class's tar inside the training archive.

    Attributes:
        samples: the number of images according to the devkit.
    """

    archive: Path
    info: tarfile.TarInfo
    label: int
    samples: int

    def members(self) -> list[ImageFile]:
        """The images, sorted by name.

        Raises:
            HpctrainError: cut short, damaged, or of another number of images.
        """
        where = f"{self.archive}: {self.info.name}"
        with open_tar(self.archive, self.info) as inner, naming(where):
            files = whole_members(inner, where)
        if len(files) != self.samples:
            raise HpctrainError(
                "HT-source-wrong-image-count",
                "{where} holds {count} images where the devkit says {wanted}",
                DOWNLOAD_AGAIN,
                where=where,
                count=len(files),
                wanted=self.samples,
            )
        for file in files:
            require_size(f"{where}: {file.name}", file.size)
        found = [
            ImageFile(
                str(self.archive), self.info.offset_data + file.offset_data, file.size, self.label, _stem(file.name)
            )
            for file in files
        ]
        return sorted(found, key=lambda member: member.key)


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
        with open_tar(self.archive) as tar, naming(str(self.archive)):
            files = sorted(whole_members(tar, str(self.archive)), key=lambda file: PurePosixPath(file.name).name)
        if len(files) != len(self.labels):
            raise HpctrainError(
                "HT-source-wrong-image-count",
                "{where} holds {count} images where the devkit's ground truth has {wanted}",
                DOWNLOAD_AGAIN,
                where=self.archive,
                count=len(files),
                wanted=len(self.labels),
            )
        found = []
        for number, (file, label) in enumerate(zip(files, self.labels, strict=True), 1):
            key = f"ILSVRC2012_val_{number:08}"
            if _stem(file.name) != key:
                raise HpctrainError(
                    "HT-archive-other-image",
                    "{archive}: {name} stands where {key}.JPEG should, so labels would be wrong",
                    DOWNLOAD_AGAIN,
                    archive=self.archive,
                    name=file.name,
                    key=key,
                )
            require_size(f"{self.archive}: {file.name}", file.size)
            found.append(ImageFile(str(self.archive), file.offset_data, file.size, label, key))
        return found


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
        found = []
        for path in sorted(self.folder.iterdir()):
            if is_clutter(path.name):
                continue
            if path.suffix.lower() not in IMAGE_SUFFIXES or not path.is_file():
                raise HpctrainError(
                    "HT-source-not-an-image",
                    "{path} is not an image ({suffixes})",
                    "move it out of the folder of images",
                    path=path,
                    suffixes=", ".join(IMAGE_SUFFIXES),
                )
            size = path.stat().st_size
            require_size(str(path), size)
            found.append(ImageFile(str(path), 0, size, self.label, self._key(path)))
        if not found:
            raise HpctrainError(
                "HT-source-no-image",
                "{folder} holds no image",
                "each class needs some, in train/ and in val/",
                folder=self.folder,
            )
        return found

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
        raise HpctrainError(
            "HT-image-too-large",
            "{where} has {size} bytes, but a photograph at most {most}",
            "leave it out, or make it smaller",
            where=where,
            size=size,
            most=MOST_BYTES,
        )


def list_part(part: ArchivePart) -> list[ImageFile]:
    """:meth:`ArchivePart.members` as a function for other processes.

    Raises:
        HpctrainError: the part cannot be listed, or a file of it cannot be read.
    """
    try:
        return part.members()
    except OSError as error:
        raise read_error(error, error.filename, "make it readable", exit_code=1) from error


def require_distinct(members: Iterable[ImageFile]) -> None:
    """Refuse names that cannot be stored in shards.

    Raises:
        HpctrainError: two images have one name, or a name is too long, no UTF-8, or not taken whole by WebDataset.
    """
    keys: Counter[str] = Counter()
    for member in members:
        keys[member.key] += 1
        fault = _fault(member.key)
        if fault:
            raise HpctrainError(
                "HT-image-bad-name",
                "{file}: an image has the name {key!a}, {problem}",
                "give it another name",
                file=member.file,
                key=member.key,
                problem=fault,
            )
    for key, count in keys.most_common(1):
        if count > 1:
            files = [member.file for member in members if member.key == key]
            raise HpctrainError(
                "HT-image-name-twice",
                "{count} images have the name {key}: {files}",
                "rename all but one",
                count=count,
                key=key,
                files=", ".join(files[:2]),
            )


def _fault(key: str) -> str | None:
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return "which is not UTF-8"
    if not 1 <= size <= _KEY_BYTES:
        return f"which is not 1 to {_KEY_BYTES} bytes long"
    return "whose part after the dot WebDataset takes for the extension" if "." in key else None


@contextlib.contextmanager
def open_tar(path: Path, member: tarfile.TarInfo | None = None) -> Iterator[tarfile.TarFile]:
    """A tar file, opened for reading its headers, or one that is a member of it.

    Raises:
        HpctrainError: it is not there, cannot be read, or is no tar file.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open_regular(path))
            headers = cast("IO[bytes]", _Headers(file.fileno(), member))
            tar = stack.enter_context(tarfile.open(fileobj=headers, mode="r:"))
        except FileNotFoundError as error:
            raise HpctrainError(
                "HT-archive-missing", "{path} is not there", "name the folder that holds the archives", path=path
            ) from error
        except OSError as error:
            raise read_error(error, path, "make it a readable file") from error
        except _DAMAGE as error:
            where = f"{path}: {member.name}" if member else path
            raise HpctrainError(
                "HT-archive-not-tar",
                "{where} is not a tar file: {problem}",
                DOWNLOAD_AGAIN,
                where=where,
                problem=str(error),
            ) from error
        yield tar


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


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Name the file in errors about a tar's structure."""
    try:
        yield
    except _DAMAGE as error:
        raise HpctrainError(
            "HT-archive-damaged",
            "{where} is cut short or damaged: {problem}",
            DOWNLOAD_AGAIN,
            where=where,
            problem=str(error),
        ) from error


def whole_members(tar: tarfile.TarFile, where: str) -> Sequence[tarfile.TarInfo]:
    """The files in a tar, after checking that its end is there.

    Raises:
        HpctrainError: it ends without the block of zeros that ends a tar, or with a damaged header, or has a file with
            holes.
        tarfile.TarError: the last file is cut short.
    """
    members = tar.getmembers()
    assert tar.fileobj is not None
    # tarfile takes a damaged header, and the end of the file, for the end of the archive.
    tar.fileobj.seek(tar.offset)
    end = tar.fileobj.read(tarfile.BLOCKSIZE)
    if len(end) < tarfile.BLOCKSIZE or end.strip(b"\0"):
        last = f" after {members[-1].name}" if members else ""
        raise HpctrainError(
            "HT-archive-damaged",
            "{where} is cut short or damaged{last}, at byte {offset}",
            DOWNLOAD_AGAIN,
            where=where,
            last=last,
            offset=tar.offset,
        )
    # Its bytes are not those that lie after its header.
    if sparse := next((member.name for member in members if member.issparse()), None):
        raise HpctrainError(
            "HT-archive-sparse-file", "{where}: {name} is a sparse file", DOWNLOAD_AGAIN, where=where, name=sparse
        )
    # Links, folders and devices are no images: they are missing where the numbers of images are compared.
    return [member for member in members if member.isfile()]


def _stem(name: str) -> str:
    return re.sub(r"\.[A-Za-z]+$", "", PurePosixPath(name).name)

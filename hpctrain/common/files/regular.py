"""Opens files that others may have written, or put something else in place of: regular files only, within a bound; and
makes files and folders that only their owner can read, whatever the umask.

A pipe or a device in place of a file would be waited for without end.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from io import BufferedReader
from pathlib import Path

from hpctrain.common.errors import HpctrainError

_LAST_BYTES = 1 << 16


def open_regular(path: Path, *, links: bool = True) -> BufferedReader:
    """Open a regular file for reading, without waiting for anybody.

    Args:
        links: follow a symbolic link. Data sets and checkpoints under version control are trees of links; those of a
            run directory lead to what is not of the run.

    Raises:
        OSError: it cannot be opened, or is something else; ``strerror`` says what.
    """
    return os.fdopen(open_descriptor(path, os.O_RDONLY, links=links), "rb")


def open_descriptor(path: Path, flags: int, mode: int = 0o600, *, links: bool = False) -> int:
    """Open a regular file as :func:`os.open` does, without waiting for anybody; other arguments and errors as above."""
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink() and not links:
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed here", str(path)) from error
        if error.errno == errno.ENXIO:
            raise OSError(errno.EINVAL, "it is not a regular file", str(path)) from error
        raise
    file_mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(file_mode):
        os.close(descriptor)
        if stat.S_ISDIR(file_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def read_regular(path: Path, limit: int, *, links: bool = True) -> bytes:
    """The content of a regular file of at most ``limit`` bytes.

    Raises:
        OSError: see :func:`open_regular`; or the file is longer.
    """
    with open_regular(path, links=links) as file:
        # Nothing is read of a file whose size says it already; one that grows has none.
        too_long = os.fstat(file.fileno()).st_size > limit
        content = b"" if too_long else file.read(limit + 1)
    if too_long or len(content) > limit:
        raise OSError(errno.EFBIG, f"it is longer than {limit / 1e6:g} MB", str(path))
    return content


def last_lines(path: Path, count: int, *, begin: int = 0) -> tuple[str, ...]:
    """The last lines of a log, of those from a byte on; none where it cannot be read. At most 64 KiB are read."""
    try:
        with open_regular(path, links=False) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin, size - _LAST_BYTES))
            return tuple(file.read(_LAST_BYTES).decode(errors="replace").splitlines()[-count:])
    except OSError:
        return ()


def read_text(path: Path, kind: str, hint: str, *, limit: int, errors: str = "strict") -> str:
    """The text of a file that the user names, in UTF-8.

    Args:
        kind: what such a file is called, without its article.
        errors: how undecodable bytes are treated, see :meth:`bytes.decode`.
    """
    try:
        return read_regular(path, limit).decode("utf-8-sig", errors)
    except OSError as error:
        raise HpctrainError(
            "HT-file-unreadable",
            "cannot read the {kind} {path}: {reason}",
            hint,
            kind=kind,
            path=path,
            reason=error.strerror,
        ) from error
    except UnicodeDecodeError as error:
        raise HpctrainError(
            "HT-file-not-text", "{path} is not a text file, so it is not a {kind}", hint, path=path, kind=kind
        ) from error


def sha256(path: Path) -> str:
    """The SHA-256 of a regular file. Raises OSError, see :func:`open_regular`."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_folder(path: Path, *, exist_ok: bool = True, within: Path | None = None) -> None:
    """Create a folder for its owner alone, and missing parents likewise.

    One that is there already keeps its mode, as its owner may share it.

    Args:
        within: a folder above it that has to be there, like a run's directory.

    Raises:
        OSError: it cannot be made, or is there already and ``exist_ok`` is not set.
    """
    for parent in reversed(path.parents):
        if (within is None or within in parent.parents) and not parent.exists():
            parent.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=exist_ok)


def private(path: str, flags: int) -> int:
    """An ``opener`` for :func:`open` that makes files readable by their owner only, and follows no link to others."""
    return open_descriptor(Path(path), flags)

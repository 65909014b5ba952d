"""Errors for disks that refuse, and durability of names."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from hpctrain.common.errors import HpctrainError

# Errors of a place that cannot hold files: the user has to choose another, so the run did not fail.
_WRONG_PLACE = frozenset(
    (errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EPERM, errno.EROFS)
)

ANOTHER_RUN = "choose another place with --run-dir"
"""How a user writes a run directory elsewhere."""

NO_RUN_HINT = "is this a run directory? `hpctrain status` lists those in hpctrain-runs/"


def disk_error(error: OSError, path: Path | None, elsewhere: str = ANOTHER_RUN) -> HpctrainError:
    """The error for a file that cannot be written; ``elsewhere`` says how to write to another place."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = f"free some space there, or {elsewhere}"
        return HpctrainError(
            "HT-disk-full",
            "no space left to write {path}: {reason}",
            hint,
            exit_code=1,
            path=path,
            reason=error.strerror,
        )
    exit_code = 2 if error.errno in _WRONG_PLACE else 1
    return HpctrainError(
        "HT-file-unwritable",
        "cannot write {path}: {reason}",
        elsewhere,
        exit_code=exit_code,
        path=path,
        reason=error.strerror,
    )


def read_error(error: OSError, path: Path | str, hint: str = "", *, exit_code: int = 2) -> HpctrainError:
    """The error for a file that cannot be read; ``hint`` says what to do."""
    reason = error.strerror
    return HpctrainError(
        "HT-file-unreadable", "cannot read {path}: {reason}", hint, exit_code=exit_code, path=path, reason=reason
    )


@contextlib.contextmanager
def reading(path: Path | str, hint: str = NO_RUN_HINT, *, exit_code: int = 2) -> Iterator[None]:
    """Make the error of :func:`read_error` of what the system refuses meanwhile."""
    try:
        yield
    except OSError as error:
        raise read_error(error, path, hint, exit_code=exit_code) from error


def matching(folder: Path, pattern: str) -> list[Path]:
    """What a folder has of names that a pattern as of :mod:`fnmatch` describes, sorted; nothing where it is not there.

    Raises:
        HpctrainError: it cannot be listed, over which :meth:`Path.glob` would pass in silence.
    """
    with reading(folder, "its owner can give you the right to read it"), contextlib.suppress(FileNotFoundError):
        return sorted(path for path in folder.iterdir() if fnmatch.fnmatchcase(path.name, pattern))
    return []


def require_empty(folder: Path, but: Collection[str] = ()) -> None:
    """Refuse a folder that has files, apart from hidden ones and those whose names are in ``but``."""
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith(".") and path.name not in but)
    if others:
        raise HpctrainError(
            "HT-output-exists",
            "{folder} holds other files already: {others}",
            "choose another folder",
            folder=folder,
            others=", ".join(others[:3]),
        )


def temporary_folder(
    prefix: str, within: Path | None, elsewhere: str = ANOTHER_RUN
) -> tempfile.TemporaryDirectory[str]:
    """A new folder that is removed after its use, in the system's place for such where ``within`` is None."""
    try:
        within = within and within.absolute()
        return tempfile.TemporaryDirectory(prefix=prefix, dir=within)
    except OSError as error:
        raise disk_error(error, within or Path(error.filename or "."), elsewhere) from error


def nearest_existing(folder: Path) -> Path:
    """A folder, or the nearest one above it that exists."""
    nearest = folder.absolute()
    while not nearest.is_dir() and nearest != nearest.parent:
        nearest = nearest.parent
    return nearest


def synchronise_folder(folder: Path) -> None:
    """Make the names in a folder survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

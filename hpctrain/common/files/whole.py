"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import uuid
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import ANOTHER_RUN, disk_error, synchronise_folder
from hpctrain.common.files.regular import private as open_private

_ELSEWHERE = "choose another folder"
# The number of random digits in a temporary name.
_DIGITS = 12


def require_room(folder: Path, wanted: int, done: str, hint: str) -> None:
    """Refuse to begin writing more than the disk can hold.

    Args:
        wanted: bytes that are to be ``done``, as "written".
    """
    free = shutil.disk_usage(folder).free
    if wanted > free:
        raise HpctrainError(
            "HT-disk-full",
            "no space left for {folder}: {wanted:.3g} GB are to be {done}, {free:.3g} GB are free",
            hint,
            exit_code=1,
            folder=folder,
            wanted=wanted / 1e9,
            done=done,
            free=free / 1e9,
        )


def write_whole(path: Path, content: bytes, *, private: bool = False, elsewhere: str | None = None) -> None:
    """Write or replace a file so that it survives a crash of the machine; never one that a link leads to.

    Args:
        private: readable by its owner only, as files of a run directory are; one that is there already keeps its mode.
        elsewhere: how the user writes to another place, for the error.
    """
    fresh = temporary(path)
    try:
        try:
            with open(fresh, "xb", opener=open_private if private else None) as file:
                if private:
                    with contextlib.suppress(FileNotFoundError):
                        if stat.S_ISREG(mode := path.lstat().st_mode):
                            os.fchmod(file.fileno(), mode & 0o777)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            put_in_place(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(error, path, elsewhere or (ANOTHER_RUN if private else _ELSEWHERE)) from error


def temporary(path: Path) -> Path:
    """A hidden name beside a file that no other process uses."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:_DIGITS]}.part")


def put_in_place(fresh: Path, path: Path) -> None:
    """Rename a complete file that is on disk to its final name."""
    fresh.replace(path)
    synchronise_folder(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove unfinished files of processes that were killed, by the names of :func:`temporary` alone."""
    for path in folder.glob(f".*.{'[0-9a-f]' * _DIGITS}.part"):
        # Another process may have removed it.
        path.unlink(missing_ok=True)

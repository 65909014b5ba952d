"""Files that appear whole or not at all, and locks between the processes that write them, by ``flock``."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import ANOTHER_RUN, disk_error, synchronise_folder
from hpctrain.common.files.regular import open_descriptor
from hpctrain.common.files.regular import private as open_private

_ELSEWHERE = "choose another folder"
_POLL_SECONDS = 0.2
# File systems that have no locks between hosts, or none at all.
_NO_LOCKS = frozenset((errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP))


@contextlib.contextmanager
def locked(folder: Path, *, seconds: float) -> Iterator[None]:
    """Create the folder if needed, and lock it for this process; the lock ends with the process."""
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = open_descriptor(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise disk_error(error, path, _ELSEWHERE) from error
    try:
        # Even without locks no file mixes two writers, because each writes under its own temporary name.
        if not lock(descriptor, path, seconds, _ELSEWHERE):
            waited = f", waited {seconds:g} s for it" if seconds else ""
            raise HpctrainError(
                "HT-folder-in-use",
                "another process is writing in {folder}{waited}",
                "wait for it to end, or end it; what is done is kept",
                exit_code=1,
                folder=folder,
                waited=waited,
            )
        yield
    finally:
        os.close(descriptor)


def lock(descriptor: int, path: Path, seconds: float, elsewhere: str) -> bool:
    """Lock an open file until it is closed or this process ends.

    Returns:
        False if the other process still has it; True also on a file system without locks.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise disk_error(error, path, elsewhere) from error
            return True


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

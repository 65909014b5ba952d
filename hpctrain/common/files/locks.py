"""Locks between processes, by ``flock``."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.regular import open_descriptor

_ELSEWHERE = "choose another folder"
_POLL_SECONDS = 0.2
# File systems that have no locks between hosts, or none at all.
_NO_LOCKS = frozenset((errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP))


@contextlib.contextmanager
def locked(folder: Path, *, seconds: float) -> Iterator[None]:
    """Create the folder if needed, and lock it for this process; the lock ends with the process.

    Args:
        seconds: how long to wait for another one.
    """
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

    Args:
        seconds: how long to wait for another process that has the lock.
        elsewhere: what the user can do where the file system refuses.

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

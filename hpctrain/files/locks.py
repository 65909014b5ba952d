"""One process at a time in a folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.files.disk import disk_error

_LOCK = ".lock"
_LOOK_SECONDS = 0.2


@contextlib.contextmanager
def locked(folder: Path, *, seconds: float) -> Iterator[None]:
    """Make the folder where it is not there, and keep it for this process; a process that ends gives it up.

    Args:
        seconds: how long to wait for another one.

    Raises:
        HpctrainError: another one still has it, or the folder cannot be made.
    """
    path = folder / _LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise disk_error(error, path, "choose another folder") from error
    try:
        _take(descriptor, folder, time.monotonic() + seconds, seconds)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, folder: Path, until: float, seconds: float) -> None:
    while not _taken(descriptor):
        if time.monotonic() >= until:
            waited = f", which was waited for {seconds:g} s" if seconds else ""
            raise HpctrainError(
                f"another process writes in {folder}{waited}",
                "let it end, or end it; what is done is kept",
                exit_code=1,
            )
        time.sleep(_LOOK_SECONDS)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks: each file is written under a name of its own, so that nothing is mixed.
        return True
    return True

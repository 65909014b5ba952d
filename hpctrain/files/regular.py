"""Reads files that others may have written, or put something else in place of: regular files only, within a bound.

A pipe or a device in place of a file would be waited for without end. Links to regular files are followed: data sets
and checkpoints that are kept under version control are trees of links.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading, without waiting for anybody.

    Raises:
        OSError: it cannot be opened, or is something else; ``strerror`` says what.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes.

    Raises:
        OSError: see :func:`open_regular`; or the file is longer.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it is longer than {limit / 1e6:g} MB", str(path))
    return content

"""Hashes of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hpctrain.common.files.regular import open_regular


def sha256(path: Path) -> tuple[str, int]:
    """The hash and size of a regular file. Raises OSError, see :func:`hpctrain.common.files.regular.open_regular`."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), file.tell()

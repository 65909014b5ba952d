"""Hashes of files."""

from __future__ import annotations

import hashlib
from pathlib import Path


def sha256(path: Path) -> tuple[str, int]:
    """The hash and size of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), file.tell()

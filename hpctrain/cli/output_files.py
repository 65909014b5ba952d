"""The file that a command writes besides its output."""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.printable import shell_word
from hpctrain.report.output import tell

_ELSEWHERE = "choose another place for it"


def require_place(file: Path) -> None:
    """Check, before a command begins its work, that it can write this file.

    Raises:
        HpctrainError: it is a folder, or its folder is missing or not writable.
    """
    problem = hint = ""
    try:
        if not file.parent.is_dir():
            problem, hint = "its folder is not there", f"mkdir -p {shell_word(file.parent)}"
        elif file.is_dir():
            problem, hint = "it is a folder", "name a file"
        elif not os.access(file if file.exists() else file.parent, os.W_OK):
            problem, hint = "permission denied", _ELSEWHERE
    except OSError as error:
        raise disk_error(error, file, _ELSEWHERE) from error
    if problem:
        raise HpctrainError("HT-output-not-writable", "cannot write {path}: " + problem, hint, path=file)


def save(file: Path, content: str) -> None:
    """Write the file, and print its path.

    Raises:
        HpctrainError: it cannot be written.
    """
    try:
        file.write_bytes(content.encode())
    except OSError as error:
        raise disk_error(error, file, _ELSEWHERE) from error
    tell(f"wrote {file}")

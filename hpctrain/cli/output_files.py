"""Files that a command writes besides its output: all of them, or none."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.printable import shell_word
from hpctrain.report.output import tell

_ELSEWHERE = "choose another place for it"


def require_places(files: Iterable[Path]) -> None:
    """Check, before anything is written, that these files can be written.

    Raises:
        HpctrainError: two are the same file, one is a folder, or a file's folder is missing or not writable.
    """
    seen: set[Path] = set()
    for file in files:
        try:
            resolved = file.parent.resolve() / file.name
            problem, hint = _problem(file, taken=resolved in seen)
        except OSError as error:
            raise disk_error(error, file, _ELSEWHERE) from error
        if problem:
            raise HpctrainError("HT-output-not-writable", "cannot write {path}: " + problem, hint, path=file)
        seen.add(resolved)


def _problem(file: Path, *, taken: bool) -> tuple[str, str]:
    if not file.parent.is_dir():
        return "its folder is not there", f"mkdir -p {shell_word(file.parent)}"
    if file.is_dir():
        return "it is a folder", "name a file"
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        return "permission denied", _ELSEWHERE
    return ("it would be written twice", "name a file for each") if taken else ("", "")


def save(contents: Mapping[Path, bytes]) -> None:
    """Write the files, and print their paths.

    Raises:
        HpctrainError: one cannot be written.
    """
    for file, content in contents.items():
        try:
            file.write_bytes(content)
        except OSError as error:
            raise disk_error(error, file, _ELSEWHERE) from error
        tell(f"wrote {file}")

"""Files and links of a packed environment, and those of a folder that goes into one."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file or link of the copy: a file as it is at ``source``, ``content``, or a link to ``link``."""

    source: Path | None = None
    content: bytes | None = None
    link: str | None = None
    executable: bool = False


def walk(
    folder: Path, *, without: Container[str] = (), within: frozenset[Path] = frozenset()
) -> Iterator[tuple[str, Entry]]:
    """The entries of a folder by their relative paths. Links that lead out of it become what they lead to.

    Args:
        without: names to skip at the top of the folder.
        within: folders that this one was reached from.

    Raises:
        OSError: a folder cannot be read.
    """
    root = folder.resolve()
    for parent, folders, files in os.walk(root, onerror=_raise):
        here = Path(parent)
        folders[:] = [name for name in folders if name != "__pycache__" and (here != root or name not in without)]
        for name in (*folders, *files):
            path = here / name
            inside = path.relative_to(root).as_posix()
            if not path.is_symlink():
                if path.is_file():
                    yield inside, Entry(source=path, executable=os.access(path, os.X_OK))
                continue
            # Not resolve(), which in Python 3.12 and before fails at a link to itself.
            target = Path(os.path.realpath(path))
            if target.is_relative_to(root):
                yield inside, Entry(link=os.path.relpath(target, here))
            elif target.is_file():
                yield inside, Entry(source=target, executable=os.access(target, os.X_OK))
            elif target.is_dir() and not any(target in (each, *each.parents) for each in (root, *within)):
                for below, entry in walk(target, within=within | {root}):
                    yield f"{inside}/{below}", entry


def _raise(error: OSError) -> NoReturn:
    """Raise what os.walk would ignore, because the folder would be missing in the copy."""
    raise error

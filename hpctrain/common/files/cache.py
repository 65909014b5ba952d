"""The user's cache folders, for files that can be made again."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.regular import make_folder


def cache_folder(kind: str) -> Path:
    """The folder for one kind of things, in ``$XDG_CACHE_HOME`` or ``~/.cache``; it may not be there yet."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "hpctrain" / kind


def node_folder(kind: str, elsewhere: str, *, code: bool = False) -> Path:
    """The user's own folder for one kind of things in the node's temporary storage, where anybody can make folders.

    Args:
        elsewhere: how another folder is chosen, for errors.
        code: whether ranks run what is in it, so that nobody else may be able to write there.

    Raises:
        HpctrainError: it cannot be made, is another user's, or can be written by others.
    """
    # Some sites set SLURM_TMPDIR in jobs, and not TMPDIR.
    temporary = os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()
    folder = Path(temporary) / f"hpctrain-{kind}-{os.getuid()}"
    try:
        make_folder(folder)
        status = folder.lstat()
    except OSError as error:
        raise disk_error(error, folder, elsewhere) from error
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid():
        raise HpctrainError("HT-cache-not-safe", "{root} belongs to another user", elsewhere, root=folder)
    if code and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise HpctrainError(
            "HT-cache-not-safe",
            "others can write into {folder}, whose files ranks run",
            f"rm -r {folder}, or {elsewhere}",
            folder=folder,
        )
    return folder.absolute()

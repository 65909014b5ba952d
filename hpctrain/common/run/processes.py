"""The processes of a run, by what the operating system says of them.

The files of a run directory can be damaged, or come from somebody else, with the number of any process in them. What a
file says is therefore only where to look: a process belongs to a run if it is this user's and holds the run's directory
open, as the launcher and every rank do. A directory has no second name, so nobody else can make a process appear to.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def processes_with(*words: str) -> list[int]:
    """The numbers of this host's processes, of all users, whose command lines have all of these words."""
    named = (process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"])
    return [process.pid for process in named if set(words) <= set(process.info["cmdline"])]


def works_in(process: psutil.Process, path: Path) -> bool:
    """Whether a process is this user's and holds the run directory ``path`` open; False where that cannot be seen."""
    try:
        wanted = path.stat()
        if process.uids().real != os.getuid():
            return False
        descriptors = [*Path(f"/proc/{process.pid}/fd").iterdir()]
    except (OSError, psutil.Error):
        return False
    return any(_is(each, wanted) for each in descriptors)


def _is(descriptor: Path, wanted: os.stat_result) -> bool:
    try:
        found = descriptor.stat()
    except OSError:
        # The descriptor was closed meanwhile.
        return False
    return (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino)

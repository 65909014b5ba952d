"""The processes of this host."""

from __future__ import annotations

import psutil


def processes_with(*words: str) -> list[int]:
    """The numbers of this host's processes, of all users, whose command lines have all of these words."""
    named = (process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"])
    return [process.pid for process in named if set(words) <= set(process.info["cmdline"])]

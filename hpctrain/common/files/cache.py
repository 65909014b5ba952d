"""The user's cache folder, for files that hpctrain can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """The folder for one kind of things, in ``$XDG_CACHE_HOME`` or ``~/.cache``; it may not be there yet."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "hpctrain" / kind

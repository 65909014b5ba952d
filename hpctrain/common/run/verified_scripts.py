"""Scripts that were verified, or whose user was told of ``hpctrain verify``: hashes in a small file of the user's."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.private import make_folder
from hpctrain.common.files.regular import read_regular
from hpctrain.common.files.whole import write_whole

# The file forgets the oldest: 65 bytes each.
_MOST = 2000
_MOST_BYTES = 2**24


def note_script(script: Path) -> bool:
    """Note a script by its content and by its place; returns whether neither was known.

    What cannot be read or written counts as known: a run neither fails nor repeats its advice because of it.
    """
    # Path.home raises a RuntimeError for a user without a home.
    with contextlib.suppress(OSError, HpctrainError, UnicodeError, RuntimeError):
        content = hashlib.sha256(read_regular(script, _MOST_BYTES, links=True)).hexdigest()
        place = hashlib.sha256(os.fsencode(script)).hexdigest()
        path = _file()
        known = read_regular(path, _MOST_BYTES, links=True).decode().split() if path.exists() else []
        new = [each for each in (content, place) if each not in known]
        if new:
            make_folder(path.parent)
            write_whole(path, "".join(f"{each}\n" for each in (known + new)[-_MOST:]).encode(), private=True)
        return len(new) == 2
    return False


def _file() -> Path:
    """In ``$XDG_STATE_HOME`` or ``~/.local/state``."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "hpctrain" / "verified-scripts"

"""File systems that are soon full, or read-only."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk_at(place: Path, size: str) -> Iterator[Path]:
    """Mounted at a folder that is made, of a size as ``mount`` takes it; a test skips where that cannot be done."""
    place.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small disk takes root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=False, capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def mounted_over(options: str, *places: Path) -> list[str]:
    """The words before a command for which small file systems lie over these folders, and for nobody else.

    Args:
        options: as ``mount`` takes them, such as ``size=64k`` or ``ro``. A test skips where that is not permitted.
    """
    mounts = [f"mount -t tmpfs -o {options} tmpfs {shlex.quote(str(place))}" for place in places]
    # Without root, in a user namespace, where the user is called root.
    words = ["unshare", "-m" if os.geteuid() == 0 else "-rm", "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh"]
    if shutil.which("unshare") is None:
        pytest.skip("mounts of its own take unshare")
    tried = subprocess.run([*words, "true"], check=False, capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"mounts of its own are not permitted here: {tried.stderr.strip()}")
    return words

"""Checks whether the run directory can be written, how fast, and how much is free."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hpctrain.common.cluster.checks import Check
from hpctrain.common.files.disk import nearest_existing

FREE_BYTES = 10**9
WRITTEN_BYTES = 8 << 20
# A file system slower than this takes 20 s for a checkpoint of 200 MB (ResNet-50 with momentum).
BYTES_PER_S = 10e6

_SPACE_SOURCE = "https://man7.org/linux/man-pages/man3/statvfs.3.html"
_WRITE_SOURCE = "https://man7.org/linux/man-pages/man2/fsync.2.html"


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A folder that was tried.

    Attributes:
        free: bytes that this user may still write.
        bytes_per_s: of a write with its fsync, None where it failed.
        error: why the write failed, empty where it did not.
    """

    path: Path
    free: int
    bytes_per_s: float | None
    error: str = ""


def try_disk(path: Path, size: int = WRITTEN_BYTES) -> Disk:
    """Write a file of ``size`` bytes into a folder, or the nearest one above that is there, and remove it."""
    folder = nearest_existing(path)
    free = shutil.disk_usage(folder).free
    # Random bytes, because file systems that compress would not write zeros.
    data = os.urandom(size)
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".hpctrain-doctor-", buffering=0) as file:
            start = time.perf_counter()
            file.write(data)
            os.fsync(file.fileno())
            seconds = time.perf_counter() - start
    except OSError as error:
        return Disk(path=folder, free=free, bytes_per_s=None, error=error.strerror or str(error))
    return Disk(path=folder, free=free, bytes_per_s=size / seconds)


def space(disk: Disk) -> Check:
    """A checkpoint that does not fit ends the run."""
    failed = disk.free < FREE_BYTES
    return Check(
        name="free disk",
        status="failed" if failed else "ok",
        found=f"{disk.free / 1e9:.3g} GB in {disk.path}",
        wanted=f"at least {FREE_BYTES / 1e9:g} GB: a few checkpoints of a ResNet-50 (0.2 GB each)",
        remedy="remove old runs, or choose another place with --run-dir" if failed else "",
        source=_SPACE_SOURCE,
    )


def write(disk: Disk) -> Check:
    """Every rank writes its log and its record there, rank 0 the checkpoints."""
    rate = disk.bytes_per_s
    failed = rate is None or rate < BYTES_PER_S
    remedy = "make the folder writable for you: ls -ld; or choose another with --run-dir" if rate is None else ""
    if rate is not None and failed:
        remedy = "choose a faster file system with --run-dir; your cluster's documentation names it (scratch, work)"
    return Check(
        name="write to run directory",
        status="failed" if failed else "ok",
        found=f"{disk.path}: {disk.error}" if rate is None else f"{rate / 1e6:,.0f} MB/s with fsync in {disk.path}",
        wanted=f"writable, at least {BYTES_PER_S / 1e6:g} MB/s",
        remedy=remedy,
        source=_WRITE_SOURCE,
    )

"""Disks that are full or refuse, on small file systems that only root can mount."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from fault_campaign.cases import NotHereError, Scene, kind
from fault_campaign.oracle import Promise

# Room for a run and its checkpoints; and less than what one of them takes.
_DISK_KB, _LEFT_KB = 8192, 200


def _require_root() -> None:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        raise NotHereError("mounting takes root")


def fill(folder: Path, left_kb: int) -> Path:
    """Fill a file system but for a rest; returns what to remove."""
    filler = folder / "filler"
    free = shutil.disk_usage(folder).free - (left_kb << 10)
    with filler.open("wb") as file:
        file.write(bytes(max(0, free)))
    return filler


def _full_disk(scene: Scene, left_kb: int) -> Promise:
    _require_root()
    run = scene.place.directory.path
    scene.place.mount(run, "-t", "tmpfs", "-o", f"size={_DISK_KB}k", "tmpfs")
    training = scene.begin()
    training.wait_for_step(*scene.moment(2, 65))
    filler = fill(run, left_kb)
    return Promise(codes=(1,), says=("no space left to write",), mends=filler.unlink)


@kind("a disk too full for a checkpoint", tm=2, th=2, ts=1, km=1, kh=1)
def full_for_checkpoints(scene: Scene) -> Promise:
    return _full_disk(scene, _LEFT_KB)


@kind("a disk that is full", tm=2, th=1, ts=1, km=1, kh=1)
def full(scene: Scene) -> Promise:
    return _full_disk(scene, 0)


@kind("checkpoints become read-only", tm=1, th=1, km=1, kh=1)
def read_only_checkpoints(scene: Scene) -> Promise:
    """As a file system that the kernel found damaged."""
    _require_root()
    training = scene.begin()
    training.wait_for_step(*scene.moment(2, 65))
    folder = scene.place.directory.checkpoints
    unmount = scene.place.mount(folder, "--bind", str(folder))
    subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True, capture_output=True)
    return Promise(codes=(1, 2), says=("cannot write .*: Read-only file system",), mends=unmount)

"""Disks that are full or refuse, on small file systems that only root can mount, and shards that lie on them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from fault_campaign.cases import NotHereError, Scene, kind
from fault_campaign.faulted_run import BIN
from fault_campaign.oracle import Event, Promise

# Room for a run and its checkpoints; and less than what one of them takes.
_DISK_KB, _LEFT_KB = 8192, 200
_IMAGES = 32


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


@kind("a place that is read-only", tm=1, th=1)
def read_only_place(scene: Scene) -> Promise:
    _require_root()
    run = scene.place.directory.path
    run.mkdir()
    unmount = scene.place.mount(run, "--bind", str(run))
    subprocess.run(["mount", "-o", "remount,bind,ro", str(run)], check=True, capture_output=True)
    scene.begin()
    return Promise(
        codes=(2,),
        says=("cannot write .*: Read-only file system",),
        mends=unmount,
        resumes=scene.setting.arguments,
    )


def _shards(scene: Scene) -> tuple[Path, Path]:
    """A small ImageNet for this case, beside the same for all; the run is of them from here on."""
    good = scene.library.folder / "shards"
    if not good.exists():
        good.parent.mkdir(parents=True, exist_ok=True)
        fake = ("fake", "archives", "--images", "100", "--size", "48", "--broken", "0")
        for arguments in (fake, ("shard", "archives", "shards", "--shard-samples", "12")):
            command = [str(BIN / "hpctrain"), "data", *arguments]
            subprocess.run(command, cwd=good.parent, check=True, capture_output=True, timeout=scene.place.limit)
    own = Path(shutil.copytree(good, scene.place.folder / "shards"))
    small = (f"data.limit={_IMAGES}", "epochs=3", "data.workers=1", "model.name=resnet18", "batch.size=8")
    settings = (*small, f"data.path={good}", "data.broken_images=stop")
    scene.change(work=("goyal2017", "--smoke", *(word for setting in settings for word in ("--set", setting))))
    return good, own


def _overwrite_image(shard: Path, scene: Scene) -> None:
    """Spoil the first bytes of one photograph in an archive, so that it cannot be decoded."""
    text = bytearray(shard.read_bytes())
    begins = [at for at in range(0, len(text), 512) if text[at : at + 3] == b"\xff\xd8\xff"]
    at = scene.draw.choice(begins[: _IMAGES // 4])
    text[at : at + 64] = bytes(64)
    shard.write_bytes(text)


def _shard(folder: Path) -> Path:
    return sorted(folder.rglob("*train*.tar"))[0]


@kind("a photograph that cannot be decoded, rule stop", tm=1, kh=1)
def spoilt_and_stop(scene: Scene) -> Promise:
    good, own = _shards(scene)
    _overwrite_image(_shard(own), scene)
    scene.begin("--set", f"data.path={own}")
    return Promise(codes=(1,), says=("cannot be decoded|cannot decode",), mends=lambda: _put_back(good, own))


@kind("a photograph that cannot be decoded, rule skip", th=1, km=1)
def spoilt_and_skip(scene: Scene) -> Promise:
    _, own = _shards(scene)
    _overwrite_image(_shard(own), scene)
    scene.begin("--set", f"data.path={own}", "--set", "data.broken_images=skip")

    def check(events: Sequence[Event]) -> list[str]:
        told = [(event["epoch"], event["count"]) for event in events if event["event"] == "broken_images"]
        return [] if told == [(1, 1)] else [f"broken images told of, by epoch: {told}"]

    return Promise(codes=(0,), equal="order", check=check)


@kind("a shard cut short", tm=1, km=1)
def shard_cut(scene: Scene) -> Promise:
    good, own = _shards(scene)
    shard = _shard(own)
    shard.write_bytes(shard.read_bytes()[: scene.draw.randrange(512, shard.stat().st_size // 2)])
    scene.begin("--set", f"data.path={own}")
    return Promise(codes=(1, 2), says=(shard.name,), mends=lambda: _put_back(good, own))


def _put_back(good: Path, own: Path) -> None:
    for file in good.rglob("*.tar"):
        shutil.copy2(file, own / file.relative_to(good))

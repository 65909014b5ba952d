"""Files of a stopped run that are damaged before it is resumed, and disks that are full or refuse."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from fault_campaign.cases import Scene, kind
from fault_campaign.oracle import Event, Promise

Damage = Callable[[Path, random.Random], object]


def cut(path: Path, draw: random.Random) -> None:
    text = path.read_bytes()
    path.write_bytes(text[: draw.randrange(len(text))])


def flip(path: Path, draw: random.Random) -> None:
    text = bytearray(path.read_bytes())
    text[draw.randrange(len(text))] ^= 1 << draw.randrange(8)
    path.write_bytes(text)


def zero_end(path: Path, draw: random.Random) -> None:
    """As a crash of the machine leaves a file whose last blocks were not written."""
    text = path.read_bytes()
    left = draw.randrange(len(text))
    path.write_bytes(text[:left] + bytes(len(text) - left))


def remove(path: Path, draw: random.Random) -> None:
    path.unlink()


def checkpoints(run: Path) -> list[Path]:
    """The newest is the last."""
    return sorted((run / "checkpoints").glob("step-*"))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def began_at(wanted: int) -> Callable[[Sequence[Event]], list[str]]:
    """A check that the last attempt went on from a checkpoint."""

    def check(events: Sequence[Event]) -> list[str]:
        began = [event["iteration"] for event in events if event["event"] == "start"][-1]
        return [] if began == wanted else [f"it went on from step {began}, not {wanted}"]

    return check


def damage_newest(scene: Scene, pattern: str, damage: Damage) -> Promise:
    """The checkpoint before the newest takes its place, and the newest is named."""
    before, newest = checkpoints(scene.stopped())[-2:]
    damage(scene.draw.choice(sorted(newest.glob(pattern))), scene.draw)
    return Promise(codes=(0,), says=(newest.name,), check=began_at(step_of(before)))


# Of a checkpoint, which files are damaged and how; and on what frameworks and backends.
_DAMAGED: dict[str, tuple[str, Damage, str]] = {
    "a checkpoint's share cut short": ("*.safetensors", cut, "tm th ts tg km kh"),
    "a checkpoint's share with a flipped bit": ("*.safetensors", flip, "tm th ts tg km kh"),
    "a checkpoint's share ending in zeros": ("*.safetensors", zero_end, "tm th km kh"),
    "a checkpoint's share missing": ("*.safetensors", remove, "tm th km"),
    "a manifest cut short": ("state.json", cut, "tm th km kh"),
    "a manifest with a flipped bit": ("state.json", flip, "tm th km kh"),
    "a manifest missing": ("state.json", remove, "tm th kh"),
}
for _name, (_pattern, _damage, _where) in _DAMAGED.items():
    kind(_name, _where)(partial(damage_newest, pattern=_pattern, damage=_damage))


@kind("every checkpoint damaged", "tm th km kh")
def all_damaged(scene: Scene) -> Promise:
    """It does not begin anew by itself; what is put back is found again."""
    run = scene.stopped()
    kept = Path(shutil.copytree(run / "checkpoints", scene.place.folder / "kept"))
    for each in checkpoints(run):
        file = scene.draw.choice(sorted(each.iterdir()))
        scene.draw.choice((cut, zero_end, remove))(file, scene.draw)

    def put_back() -> None:
        shutil.rmtree(run / "checkpoints")
        shutil.copytree(kept, run / "checkpoints")

    names = [each.name for each in checkpoints(run)]
    return Promise(codes=(1,), says=("none can be read", *names), mends=put_back)


@kind("a checkpoint half written", "tm th ts km kh")
def half_written(scene: Scene) -> Promise:
    """What a crash leaves is not taken for one, and is cleared away."""
    run = scene.stopped()
    newest = checkpoints(run)[-1]
    later = step_of(newest) + scene.draw.randint(0, 5)
    left = Path(shutil.copytree(newest, run / "checkpoints" / f".step-{later:08}.{scene.draw.randbytes(4).hex()}"))
    for file in scene.draw.sample(sorted(left.iterdir()), scene.draw.randint(0, 1)):
        file.unlink()
    cut(scene.draw.choice(sorted(left.iterdir())), scene.draw)

    def check(events: Sequence[Event]) -> list[str]:
        still = [f"{left.name} is still there"] if left.exists() else []
        return [*began_at(step_of(newest))(events), *still]

    return Promise(codes=(0,), check=check)


def _events(run: Path) -> tuple[Path, list[bytes]]:
    path = run / "events.jsonl"
    return path, path.read_bytes().splitlines(keepends=True)


@kind("events.jsonl cut within its last line", "tm th km kh")
def events_cut(scene: Scene) -> Promise:
    path, lines = _events(scene.stopped())
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][: scene.draw.randrange(len(lines[-1]))])
    return Promise(codes=(0,))


@kind("the first line of events.jsonl damaged", "tm th km")
def events_damaged(scene: Scene) -> Promise:
    """How an attempt began is not guessed: the line is named, and the run goes on once it is put right."""
    path, lines = _events(scene.stopped())
    path.write_bytes(b"".join((lines[0][: len(lines[0]) // 2] + b"\n", *lines[1:])))
    said = (r"events\.jsonl:1: not an event",)
    return Promise(codes=(1, 2), says=said, mends=lambda: path.write_bytes(b"".join(lines)) and None)


@kind("plan.json damaged", "tm km")
def plan_damaged(scene: Scene) -> Promise:
    """Without the plan nothing is known of the run; it is named, and the run goes on once it is put back."""
    path = scene.stopped() / "plan.json"
    text = path.read_bytes()
    path.write_bytes(text[: len(text) // 2])
    return Promise(codes=(1, 2), says=("plan.json",), mends=lambda: path.write_bytes(text) and None)


# Room for a run and its checkpoints; and less than what one of them takes.
_DISK_KB, _LEFT_KB = 8192, 200


def full_disk(scene: Scene, left_kb: int = _LEFT_KB) -> Promise:
    """The run's disk is filled but for a rest, until the run is resumed."""
    _require_root()
    run = scene.place.directory.path
    scene.place.mount(run, "-t", "tmpfs", "-o", f"size={_DISK_KB}k", "tmpfs")
    training = scene.begin()
    training.wait_for_step(*scene.moment(2, 65))
    filler = run / "filler"
    filler.write_bytes(bytes(max(0, shutil.disk_usage(run).free - (left_kb << 10))))
    return Promise(codes=(1,), says=("no space left to write",), mends=filler.unlink)


kind("a disk too full for a checkpoint", "tm th ts km kh")(full_disk)
kind("a disk that is full", "tm th ts km kh")(partial(full_disk, left_kb=0))


@kind("checkpoints become read-only", "tm th km kh")
def read_only_checkpoints(scene: Scene) -> Promise:
    """As a file system that the kernel found damaged."""
    _require_root()
    training = scene.begin()
    training.wait_for_step(*scene.moment(2, 65))
    folder = scene.place.directory.checkpoints
    unmount = scene.place.mount(folder, "--bind", str(folder))
    subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True, capture_output=True)
    return Promise(codes=(1, 2), says=("cannot write .*: Read-only file system",), mends=unmount)


def _require_root() -> None:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting takes root")

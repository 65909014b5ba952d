"""Files of a stopped run that are damaged before it is resumed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

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
_DAMAGED: dict[str, tuple[str, Damage, dict[str, int]]] = {
    "a checkpoint's share cut short": ("*.safetensors", cut, {"tm": 3, "th": 2, "ts": 1, "tg": 1, "km": 1, "kh": 1}),
    "a checkpoint's share with a flipped bit": (
        "*.safetensors",
        flip,
        {"tm": 4, "th": 3, "ts": 1, "tg": 1, "km": 1, "kh": 1},
    ),
    "a checkpoint's share ending in zeros": ("*.safetensors", zero_end, {"tm": 2, "th": 2, "km": 1, "kh": 1}),
    "a checkpoint's share missing": ("*.safetensors", remove, {"tm": 1, "th": 1, "km": 1}),
    "a manifest cut short": ("state.json", cut, {"tm": 2, "th": 1, "km": 1, "kh": 1}),
    "a manifest with a flipped bit": ("state.json", flip, {"tm": 4, "th": 3, "km": 1, "kh": 1}),
    "a manifest missing": ("state.json", remove, {"tm": 1, "th": 1, "kh": 1}),
}
for _name, (_pattern, _damage, _where) in _DAMAGED.items():
    kind(_name, **_where)(partial(damage_newest, pattern=_pattern, damage=_damage))


@kind("every checkpoint damaged", tm=2, th=1, km=1, kh=1)
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


@kind("a checkpoint half written", tm=2, th=2, ts=1, km=1, kh=1)
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


@kind("events.jsonl cut within its last line", tm=2, th=2, km=1, kh=1)
def events_cut(scene: Scene) -> Promise:
    path, lines = _events(scene.stopped())
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][: scene.draw.randrange(len(lines[-1]))])
    return Promise(codes=(0,))


@kind("a line of events.jsonl damaged", tm=1, th=1, km=1)
def events_damaged(scene: Scene) -> Promise:
    """It is the run's record: nothing is guessed, the line is named, and the run goes on once it is put right."""
    path, lines = _events(scene.stopped())
    number = scene.draw.randrange(len(lines) - 1)
    path.write_bytes(
        b"".join((*lines[:number], lines[number][: len(lines[number]) // 2] + b"\n", *lines[number + 1 :]))
    )
    return Promise(
        codes=(1, 2),
        says=(rf"events\.jsonl:{number + 1}: not an event",),
        mends=lambda: path.write_bytes(b"".join(lines)) and None,
    )


@kind("plan.json damaged", tm=1, km=1)
def plan_damaged(scene: Scene) -> Promise:
    """Without the plan nothing is known of the run; it is named, and the run goes on once it is put back."""
    path = scene.stopped() / "plan.json"
    text = path.read_bytes()
    path.write_bytes(text[: len(text) // 2])
    return Promise(codes=(1, 2), says=("plan.json",), mends=lambda: path.write_bytes(text) and None)

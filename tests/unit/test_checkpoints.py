"""Checkpoints are whole or not there, and a damaged one is passed over and named."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hpctrain.checkpoints import Progress, checkpoint_path, newest_checkpoint, read_checkpoint, write_checkpoint
from hpctrain.errors import HpctrainError

STATE = {"model.a": np.arange(6, dtype=np.float32).reshape(2, 3), "optimizer.0.step": np.array(3.0)}


def write(folder: Path, iteration: int, losses: tuple[float, ...] = (0.1, 1 / 3, float("nan"), float("inf"))) -> Path:
    progress = Progress(
        iteration=iteration,
        epoch=2,
        losses=losses,
        sizes=(2,) * len(losses),
        epoch_seconds=0.1 + 0.2,
        seconds=1 / 3,
        ranks=2,
        samples="those",
    )
    return write_checkpoint(folder, progress, STATE)


def test_what_is_written_is_read_bit_by_bit(tmp_path: Path) -> None:
    path = write(tmp_path, 123)
    assert path.name == "step-00000123"
    progress, state = read_checkpoint(path)
    assert progress.losses[:2] == (0.1, 1 / 3)
    assert np.isnan(progress.losses[2]) and np.isinf(progress.losses[3])
    assert (progress.epoch_seconds, progress.seconds) == (0.1 + 0.2, 1 / 3)
    assert {name: (a.shape, a.dtype, a.tobytes()) for name, a in state.items()} == {
        name: (a.shape, a.dtype, a.tobytes()) for name, a in STATE.items()
    }


def test_the_newest_two_are_kept_and_lost_steps_and_crashes_leave_nothing(tmp_path: Path) -> None:
    for iteration in (10, 20, 30):
        write(tmp_path, iteration)
    (tmp_path / ".step-00000040").mkdir()
    (tmp_path / "notes").mkdir()
    write(tmp_path, 25)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-00000020", "step-00000025"]
    write(tmp_path, 25)
    assert newest_checkpoint(tmp_path) == (25, ())


def cut(path: Path) -> None:
    file = path / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut short": cut,
    "empty": lambda path: (path / "state.safetensors").write_bytes(b""),
    "no state": lambda path: (path / "state.safetensors").unlink(),
    "no progress": lambda path: (path / "state.json").unlink(),
    "half a progress": lambda path: (path / "state.json").write_text('{"iteration": 2'),
    "of another step": lambda path: shutil.copytree(checkpoint_path(path.parent, 10), path, dirs_exist_ok=True),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_one_is_passed_over_and_named(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    write(tmp_path, 10)
    damage(write(tmp_path, 20))
    iteration, faults = newest_checkpoint(tmp_path)
    assert iteration == 10
    assert len(faults) == 1 and "step-00000020" in faults[0]


def test_none_at_all(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "checkpoints") == (0, ())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small disk takes root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], check=False, capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_keeps_the_one_before(small_disk: Path) -> None:
    write(small_disk, 10)
    progress = Progress(iteration=20, epoch=1, losses=(), sizes=(), epoch_seconds=1, seconds=1, ranks=1, samples="")
    with pytest.raises(HpctrainError, match="no space left") as caught:
        write_checkpoint(small_disk, progress, {"large": np.zeros(100_000)})
    assert caught.value.exit_code == 1
    assert newest_checkpoint(small_disk) == (10, ())


def test_one_of_another_version_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    progress = Progress(iteration=20, epoch=1, losses=(), sizes=(), epoch_seconds=1, seconds=1, ranks=1, samples="")
    file = write_checkpoint(tmp_path, progress, {}) / "state.json"
    file.write_text(progress.model_dump_json(exclude={"sizes"}))
    iteration, (fault,) = newest_checkpoint(tmp_path)
    assert iteration == 0
    assert fault.endswith("written by another version of hpctrain, which can go on with it: state.json lacks 'sizes'")

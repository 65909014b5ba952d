"""Checkpoints are whole or not there, and a damaged one is passed over and named."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpctrain.common.checkpoints import find
from hpctrain.common.checkpoints.find import Newest, Policy, newest_whole
from hpctrain.common.checkpoints.layout import checkpoint_path
from hpctrain.common.checkpoints.manifest import OtherVersionError
from hpctrain.common.checkpoints.read import read_state
from support.refusals import refused
from support.written_checkpoints import progress_of, write_checkpoint

EQUAL = {"model.a": np.arange(6, dtype=np.float32).reshape(2, 3), "optimizer.0.step": np.array(3.0)}
OWN = tuple({f"random.cpu.{rank}": np.full(3, rank, np.uint8)} for rank in range(2))


def write(folder: Path, iteration: int, losses: tuple[float, ...] = (0.1, 1 / 3, float("nan"), float("inf"))) -> Path:
    progress = progress_of(
        iteration, ranks=2, losses=losses, sizes=(2,) * len(losses), epoch_seconds=0.1 + 0.2, seconds=1 / 3
    )
    path = write_checkpoint(folder, progress, EQUAL | OWN[0], OWN[1])
    find.delete_unkept(Policy(), folder, iteration, {})
    return path


def test_what_is_written_is_read_bit_by_bit(tmp_path: Path) -> None:
    path = write(tmp_path, 123)
    assert path.name == "step-00000123"
    manifest, state = read_state(path, 1, 2)
    progress = manifest.progress
    assert progress.losses[:2] == (0.1, 1 / 3)
    assert np.isnan(progress.losses[2]) and np.isinf(progress.losses[3])
    assert (progress.epoch_seconds, progress.seconds) == (0.1 + 0.2, 1 / 3)
    assert {name: (a.shape, a.dtype, a.tobytes()) for name, a in state.items()} == {
        name: (a.shape, a.dtype, a.tobytes()) for name, a in (EQUAL | {"random.cpu": np.full(3, 1, np.uint8)}).items()
    }


def test_the_newest_two_are_kept_and_lost_steps_leave_nothing(tmp_path: Path) -> None:
    for iteration in (10, 20, 30):
        write(tmp_path, iteration)
    (tmp_path / "notes").mkdir()
    write(tmp_path, 25)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-00000020", "step-00000025"]
    write(tmp_path, 25)
    assert newest_whole(tmp_path) == Newest(iteration=25)


def cut(path: Path) -> None:
    file = path / "rank-1-of-2.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut short": cut,
    "empty": lambda path: (path / "rank-1-of-2.safetensors").write_bytes(b""),
    "no state": lambda path: (path / "rank-1-of-2.safetensors").unlink(),
    "no progress": lambda path: (path / "state.json").unlink(),
    "half a progress": lambda path: (path / "state.json").write_text('{"iteration": 2'),
    "a digit of the progress": lambda path: (path / "state.json").write_text(
        (path / "state.json").read_text().replace('"epoch": 1', '"epoch": 3')
    ),
    "of another step": lambda path: shutil.copytree(checkpoint_path(path.parent, 10), path, dirs_exist_ok=True),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_one_is_passed_over_and_named(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    write(tmp_path, 10)
    damage(write(tmp_path, 20))
    newest = newest_whole(tmp_path)
    assert newest.iteration == 10
    ((path, fault),) = newest.damaged
    assert path.name == "step-00000020" in fault


def test_names_that_a_file_system_goes_on_to_list_are_looked_for_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of NFS do for seconds, of what another machine deleted."""
    monkeypatch.setattr(find, "iterations", lambda folder: [20])
    assert newest_whole(tmp_path) == Newest()


def test_only_their_owner_reads_them(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = write(tmp_path / "checkpoints", 10)
    finally:
        os.umask(before)
    assert {each.name: oct(each.stat().st_mode & 0o777) for each in path.iterdir()} == {
        name: oct(0o600)
        for name in ("state.json", "state.sha256", "rank-0-of-2.safetensors", "rank-1-of-2.safetensors")
    }


def test_a_type_that_no_file_can_hold_is_named(tmp_path: Path) -> None:
    with refused("HT-checkpoint-cannot-hold-dtype", name="model.a", dtype="complex64") as caught:
        write_checkpoint(tmp_path, progress_of(1), {"model.a": np.zeros(2, np.complex64)})
    assert caught.value.exit_code == 1


def test_one_of_another_version_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path, progress_of(20)) / "state.json"
    content = json.loads(file.read_text())
    del content["progress"]["sizes"]
    content["format"] = "hpctrain 0"
    file.write_text(json.dumps(content))
    file.with_suffix(".sha256").write_text(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  state.json\n")
    with refused("HT-checkpoint-other-version") as caught:
        newest_whole(tmp_path)
    assert type(caught.value) is OtherVersionError and caught.value.exit_code == 1
    assert "progress.sizes" in caught.value.message and "'hpctrain 2'" in caught.value.message

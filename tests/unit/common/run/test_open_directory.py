"""A run directory that is renamed, replaced or deleted while it is held."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.open_directory import HeldDirectory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.path.mkdir()
    made.plan.write_text("{}")
    return made


@pytest.fixture
def held(directory: RunDirectory) -> Iterator[HeldDirectory]:
    with HeldDirectory(directory) as each:
        yield each


def test_one_that_stays(held: HeldDirectory) -> None:
    assert [held.lost() for _ in range(3)] == [None] * 3
    assert held.work.plan.read_text() == "{}"


@pytest.mark.parametrize("replaced", [False, True])
def test_one_that_is_moved(directory: RunDirectory, held: HeldDirectory, tmp_path: Path, replaced: bool) -> None:
    moved = directory.path.rename(tmp_path / "elsewhere")
    if replaced:
        directory.path.mkdir()
        directory.plan.write_text("another's")
    assert held.lost() is None
    assert str(directory.path) in (held.lost() or "")
    held.work.stop.write_text("x")
    assert (moved / "stop").exists() and not directory.stop.exists()
    moved.rename(directory.path) if not replaced else None
    assert (held.lost() is None) == (not replaced)


@pytest.mark.parametrize("what", ["all", "its plan"])
def test_one_that_is_deleted(directory: RunDirectory, held: HeldDirectory, what: str) -> None:
    if what == "all":
        shutil.rmtree(directory.path)
    else:
        directory.plan.unlink()
    assert held.gone() and held.lost() is None
    assert held.lost()


def test_a_file_server_that_does_not_answer_has_moved_nothing(
    held: HeldDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, **options: bool) -> os.stat_result:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "stat", fails)
    assert not held.gone()


def test_words_have_the_name(directory: RunDirectory, held: HeldDirectory) -> None:
    hint = "see /proc/self/fd/9/checkpoints/step-1"
    error = held.in_words(HpctrainError("HT-of-test", "at {path}", hint, path=held.work.events))
    assert error.message == f"at {directory.events}"
    assert error.values == {"path": str(directory.events)}
    assert error.hint == f"see {directory.checkpoints}/step-1", "of another rank, too"


def test_a_relative_path_is_meant_from_where_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory(Path("run"))
    directory.path.mkdir()
    directory.plan.write_text("{}")
    with HeldDirectory(directory) as held:
        monkeypatch.chdir("/")
        assert [held.lost() for _ in range(3)] == [None] * 3

"""What is in place of a file is neither waited for, nor read without an end, nor written through."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.common.files.regular import open_regular, private, read_regular, read_text
from hpctrain.common.files.whole import write_whole
from support.refusals import refused


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _long(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(20 * 10**9)


@pytest.mark.parametrize("make", [_pipe, _device, _long, Path.mkdir])
def test_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "file"
    make(path)
    with pytest.raises(OSError, match=r"file|directory"):
        read_regular(path, 1000)
    with refused("HT-file-unreadable", kind="recipe", path=path) as caught:
        read_text(path, "recipe", "name another", limit=1000)
    assert caught.value.exit_code == 2


def test_links(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("theirs")
    link = tmp_path / "link"
    link.symlink_to("secret")
    assert read_regular(link, 6) == b"theirs"
    for opening in (lambda: open_regular(link, links=False), lambda: private(str(link), os.O_WRONLY | os.O_APPEND)):
        with pytest.raises(OSError, match="symbolic link"):
            opening()
    assert (tmp_path / "secret").read_text() == "theirs"


@pytest.mark.parametrize("flags", [os.O_WRONLY | os.O_APPEND | os.O_CREAT, os.O_RDWR | os.O_CREAT])
def test_a_pipe_is_not_written_to(tmp_path: Path, flags: int) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        private(str(tmp_path / "pipe"), flags)


@pytest.mark.parametrize("hard", [True, False])
def test_what_is_written_goes_through_no_link(tmp_path: Path, hard: bool) -> None:
    target, path = tmp_path / "authorized_keys", tmp_path / "report.html"
    target.write_text("mine")
    (path.hardlink_to if hard else path.symlink_to)(target)
    write_whole(path, b"theirs", private=True)
    assert target.read_text() == "mine"
    assert path.read_text() == "theirs"
    assert not path.is_symlink()


def test_modes(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_whole(path, b"one", private=True)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    write_whole(path, b"two", private=True)
    assert path.stat().st_mode & 0o777 == 0o644
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]

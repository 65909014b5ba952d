"""Sources that are not whole, or not what they are named: each is refused in words, and nothing is left of it."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.common.shards import image_sources
from hpctrain.common.shards.devkit import GROUND_TRUTH, META
from hpctrain.common.shards.fake import FakeSet, make_fake
from support.refusals import refused
from support.shard_folders import shard

_TRAIN, _VAL, _DEVKIT = image_sources.ARCHIVES


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("right") / "source"
    make_fake(folder, FakeSet(images=120, classes=4, seed=0, size=32, broken=2))
    return folder


def _rewritten(path: Path, change: Callable[[list[tuple[str, bytes]]], list[tuple[str, bytes]]]) -> None:
    """Write a tar again with other members."""
    with tarfile.open(path) as tar:
        members = change([(info.name, tar.extractfile(info).read()) for info in tar])
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def _cut_class_tar(members: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    return [(name, content[:9000] if number == 1 else content) for number, (name, content) in enumerate(members)]


def _folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _members(change: Callable[[list[tuple[str, bytes]]], list[tuple[str, bytes]]]) -> Callable[[Path], None]:
    return lambda path: _rewritten(path, change)


# What is done to an archive, and what of the error names it.
_WRONG: dict[str, tuple[str, Callable[[Path], object], tuple[str, ...]]] = {
    "no archive": (_VAL, Path.unlink, ("HT-source-wrong", _VAL)),
    "not a tar": (_TRAIN, lambda path: path.write_bytes(b"<html>403</html>" * 99), ("HT-archive-damaged",)),
    "not a kit": (_DEVKIT, lambda path: path.write_bytes(b"<html>"), ("HT-archive-damaged",)),
    "kit cut short": (_DEVKIT, lambda path: os.truncate(path, 300), ("HT-archive-damaged",)),
    "kit that is a folder": (_DEVKIT, _folder_instead, ("HT-archive-damaged",)),
    "header of nonsense": (_TRAIN, lambda path: _overwritten(path, b"\x81" + b"\xff" * 11), ("HT-archive-damaged",)),
    "name that is no UTF-8": (
        _TRAIN,
        _members(lambda m: [(m[0][0], _renamed(m[0][1], b"\xff\xfe.JPEG")), *m[1:]]),
        ("HT-source-wrong", "'\\udcff\\udcfe'"),
    ),
    "name with dots": (
        _TRAIN,
        _members(lambda m: [(m[0][0], _renamed(m[0][1], b"n1.2.JPEG")), *m[1:]]),
        ("HT-source-wrong", "'n1.2'"),
    ),
    "kit without a file": (_DEVKIT, _members(lambda m: m[:1]), ("HT-archive-damaged", GROUND_TRUTH)),
    "kit of another set": (
        _DEVKIT,
        _members(lambda m: [m[0], (m[1][0], b"1\n77\n")]),
        ("HT-archive-damaged", GROUND_TRUTH, "line 2: '77'"),
    ),
    "kit without a table": (_DEVKIT, _members(lambda m: [(m[0][0], b"nothing"), m[1]]), ("HT-archive-damaged", META)),
    "cut in an image": (_VAL, lambda path: os.truncate(path, 4000), ("HT-archive-damaged",)),
    "cut between images": (_VAL, lambda path: os.truncate(path, _second(path)), ("HT-archive-damaged",)),
    "class tar cut short": (_TRAIN, _members(_cut_class_tar), ("HT-archive-damaged", f"{_TRAIN}: n09000017.tar: ")),
    "class missing": (
        _TRAIN,
        _members(lambda m: m[:-1]),
        ("HT-archive-damaged", "lacks n09000051.tar, against the 4 "),
    ),
    "class too many": (_TRAIN, _members(lambda m: [*m, ("n1.tar", m[0][1])]), ("HT-archive-damaged", "has n1.tar, ")),
    "another class's images": (
        _TRAIN,
        _members(lambda m: [m[0], (m[1][0], m[0][1]), *m[2:]]),
        ("HT-source-wrong", "2 images have the name n09000000_1"),
    ),
    "image missing": (_VAL, _members(lambda m: m[1:]), ("HT-archive-damaged", "11 images, ", " 12")),
    "image renamed": (
        _VAL,
        _members(lambda m: [*m[:-1], ("ILSVRC2012_val_00000099.JPEG", b"")]),
        ("HT-archive-damaged", "ILSVRC2012_val_00000099.JPEG", "ILSVRC2012_val_00000012"),
    ),
}


def _overwritten(path: Path, size: bytes) -> None:
    """The size in the first header, with its sum put right."""
    content = bytearray(path.read_bytes())
    content[124:136] = size
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    path.write_bytes(content)


def _renamed(tar: bytes, name: bytes) -> bytes:
    """A tar whose first member has another name."""
    content = bytearray(tar)
    content[:100] = name.ljust(100, b"\0")
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    return bytes(content)


def _second(path: Path) -> int:
    with tarfile.open(path) as tar:
        return tar.getmembers()[1].offset


@pytest.mark.parametrize("case", _WRONG)
def test_a_wrong_archive_is_refused(case: str, source: Path, tmp_path: Path):
    archive, spoil, (code, *words) = _WRONG[case]
    copy = tmp_path / "source"
    shutil.copytree(source, copy)
    spoil(copy / archive)
    with refused(code, str(copy), archive, *words) as caught:
        shard(copy, tmp_path / "shards")
    assert caught.value.hint
    assert not (tmp_path / "shards").exists()


def test_a_split_without_images_is_refused(source: Path, tmp_path: Path):
    copy = Path(shutil.copytree(source, tmp_path / "source"))
    _rewritten(copy / _VAL, lambda m: [])
    _rewritten(copy / _DEVKIT, lambda m: [m[0], (m[1][0], b"")])
    with refused("HT-source-wrong", "has no image in val", path=copy):
        shard(copy, tmp_path / "shards")
    assert not (tmp_path / "shards").exists()


# Files and folders of a source (which end in a slash), and the one that is named with some words.
_FOLDERS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    ((), "", "neither archives nor folders"),
    (("train/n1/",), "val", "is not there"),
    (("train/n1/", "val/n2/"), "", "n1, n2"),
    (("train/n1/", "val/n1/"), "train/n1", "holds no image"),
    (("train/n1/one.JPEG", "val/n1/notes.txt"), "val/n1/notes.txt", "is not an image"),
    (("train/n1/one.JPEG", "val/notes.txt"), "val/notes.txt", "is not the folder of a class"),
    (("train/n1/one.JPEG", "val/"), "val", "has no folder of a class"),
)


@pytest.mark.parametrize(("paths", "named", "words"), _FOLDERS)
def test_a_folder_without_a_set_is_refused(paths: tuple[str, ...], named: str, words: str, tmp_path: Path):
    source = tmp_path / "source"
    with refused("HT-source-wrong", "is not a folder", path=source):
        shard(source, tmp_path / "shards")
    source.mkdir()
    for path in paths:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).mkdir() if path.endswith("/") else (source / path).touch()
    with refused("HT-source-wrong", words, path=source / named):
        shard(source, tmp_path / "shards")

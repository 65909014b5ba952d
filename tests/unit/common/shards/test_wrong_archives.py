"""Sources that are not whole, or not what they are named: each is refused in words, and nothing is left of it."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.common.shards import archives
from hpctrain.common.shards.devkit import GROUND_TRUTH, META
from hpctrain.common.shards.fake import FakeSet, make_fake
from hpctrain.common.shards.make import ShardRequest, make_shards
from support.refusals import codes, refused

_TRAIN, _VAL, _DEVKIT = archives.CHECKSUMS


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("right") / "source"
    make_fake(folder, FakeSet(images=120, classes=4, seed=0, size=32, broken=2))
    return folder


def _make(source: Path, folder: Path) -> None:
    make_shards(ShardRequest(source=source, folder=folder, shard_samples=20), map, lambda words: None)


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


_LACKS = {"problem": "lacks", "classes": "n09000051.tar", "wanted": 4}
_WRONG: dict[str, tuple[str, Callable[[Path], object], str, dict[str, object]]] = {
    "no archive": (_VAL, Path.unlink, "HT-source-lacks-archive", {"name": _VAL}),
    "no ground truth": (_DEVKIT, Path.unlink, "HT-source-lacks-archive", {"name": _DEVKIT}),
    "not a tar": (_TRAIN, lambda path: path.write_bytes(b"<html>403</html>" * 99), "HT-archive-not-tar", {}),
    "not a kit": (_DEVKIT, lambda path: path.write_bytes(b"<html>"), "HT-devkit-unreadable", {}),
    "kit cut short": (_DEVKIT, lambda path: os.truncate(path, 300), "HT-devkit-unreadable", {}),
    "kit with a flipped byte": (_DEVKIT, lambda path: _flipped(path), "HT-devkit-unreadable", {}),
    "archive that is a folder": (_VAL, lambda path: (path.unlink(), path.mkdir()), "HT-file-unreadable", {}),
    "kit that is a folder": (_DEVKIT, lambda path: (path.unlink(), path.mkdir()), "HT-devkit-unreadable", {}),
    "header of nonsense": (_TRAIN, lambda path: _overwritten(path, b"\x81" + b"\xff" * 11), "HT-archive-not-tar", {}),
    "name that is no UTF-8": (
        _TRAIN,
        lambda path: _rewritten(path, lambda m: [(m[0][0], _renamed(m[0][1], b"\xff\xfe.JPEG")), *m[1:]]),
        *("HT-image-bad-name", {"key": "\udcff\udcfe"}),
    ),
    "name with dots": (
        _TRAIN,
        lambda path: _rewritten(path, lambda m: [(m[0][0], _renamed(m[0][1], b"n1.2.JPEG")), *m[1:]]),
        *("HT-image-bad-name", {"key": "n1.2"}),
    ),
    "kit without a file": (
        _DEVKIT,
        lambda path: _rewritten(path, lambda m: m[:1]),
        *("HT-devkit-lacks-file", {"name": GROUND_TRUTH}),
    ),
    "kit of another set": (
        _DEVKIT,
        lambda path: _rewritten(path, lambda m: [m[0], (m[1][0], b"1\n77\n")]),
        *("HT-devkit-unknown-class", {"file": GROUND_TRUTH, "line": 2, "label": "77"}),
    ),
    "kit without a table": (
        _DEVKIT,
        lambda path: _rewritten(path, lambda m: [(m[0][0], b"nothing"), m[1]]),
        *("HT-devkit-no-synsets", {"name": META}),
    ),
    "empty": (_TRAIN, lambda path: os.truncate(path, 0), "HT-archive-not-tar", {}),
    "cut in an image": (_VAL, lambda path: os.truncate(path, 4000), "HT-archive-damaged", {}),
    "cut between images": (_VAL, lambda path: os.truncate(path, _second(path)), "HT-archive-damaged", {}),
    "class tar cut short": (
        _TRAIN,
        lambda path: _rewritten(path, _cut_class_tar),
        *("HT-archive-damaged", {"inner": "n09000017.tar"}),
    ),
    "class missing": (_TRAIN, lambda path: _rewritten(path, lambda m: m[:-1]), "HT-archive-wrong-classes", _LACKS),
    "class too many": (
        _TRAIN,
        lambda path: _rewritten(path, lambda m: [*m, ("n1.tar", m[0][1])]),
        *("HT-archive-wrong-classes", {"problem": "has", "classes": "n1.tar", "wanted": 4}),
    ),
    "another class's images": (
        _TRAIN,
        lambda path: _rewritten(path, lambda m: [m[0], (m[1][0], m[0][1]), *m[2:]]),
        *("HT-image-name-twice", {"count": 2, "key": "n09000000_1"}),
    ),
    "image missing": (
        _VAL,
        lambda path: _rewritten(path, lambda m: m[1:]),
        *("HT-source-wrong-image-count", {"count": 11, "wanted": 12}),
    ),
    "image renamed": (
        _VAL,
        lambda path: _rewritten(path, lambda m: [*m[:-1], ("ILSVRC2012_val_00000099.JPEG", b"")]),
        *("HT-archive-other-image", {"name": "ILSVRC2012_val_00000099.JPEG", "key": "ILSVRC2012_val_00000012"}),
    ),
}


def _flipped(path: Path) -> None:
    """One bit, in the middle of what is packed, where a table's sizes are."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


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
    archive, spoil, code, values = _WRONG[case]
    copy = tmp_path / "source"
    shutil.copytree(source, copy)
    spoil(copy / archive)
    with refused(code, **{name: value for name, value in values.items() if name != "inner"}) as caught:
        _make(copy, tmp_path / "shards")
    named = [str(value) for value in caught.value.values.values()]
    wanted = ": ".join([str(copy / archive), *filter(None, [values.get("inner")])])
    assert code == "HT-source-lacks-archive" or any(name.partition(", ")[0] == wanted for name in named)
    assert caught.value.hint
    assert not (tmp_path / "shards").exists()


def test_a_split_without_images_is_refused(source: Path, tmp_path: Path):
    copy = Path(shutil.copytree(source, tmp_path / "source"))
    _rewritten(copy / _VAL, lambda m: [])
    _rewritten(copy / _DEVKIT, lambda m: [m[0], (m[1][0], b"")])
    with refused("HT-source-lacks-split", source=copy, split="val"):
        _make(copy, tmp_path / "shards")
    assert not (tmp_path / "shards").exists()


def test_a_folder_without_a_set_is_refused(tmp_path: Path, source: Path):
    with refused("HT-source-not-a-folder", folder=tmp_path / "nowhere"):
        _make(tmp_path / "nowhere", tmp_path / "shards")
    with refused("HT-source-unknown", folder=tmp_path):
        _make(tmp_path, tmp_path / "shards")
    (tmp_path / "tree/train/n1").mkdir(parents=True)
    with refused("HT-source-lacks-folder", folder=tmp_path / "tree/val"):
        _make(tmp_path / "tree", tmp_path / "shards")
    (tmp_path / "tree/val/n2").mkdir(parents=True)
    with refused("HT-source-class-in-one-split", classes="n1, n2"):
        _make(tmp_path / "tree", tmp_path / "shards")
    (tmp_path / "tree/val/n2").rename(tmp_path / "tree/val/n1")
    for name in ("cafe\u0301", "caf\u00e9"):
        (tmp_path / "tree/train" / name).mkdir()
    with refused("HT-source-class-twice", folder=tmp_path / "tree/train", one="cafe\u0301", other="caf\u00e9"):
        _make(tmp_path / "tree", tmp_path / "shards")
    for name in ("cafe\u0301", "caf\u00e9"):
        (tmp_path / "tree/train" / name).rmdir()
    with refused("HT-source-no-image", folder=tmp_path / "tree/train/n1"):
        _make(tmp_path / "tree", tmp_path / "shards")
    (tmp_path / "tree/train/n1/one.JPEG").write_bytes(b"?")
    (tmp_path / "tree/val/n1/notes.txt").write_text("")
    with refused("HT-source-not-an-image", path=tmp_path / "tree/val/n1/notes.txt"):
        _make(tmp_path / "tree", tmp_path / "shards")


def test_checksums_are_compared(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["data", "shard", str(source), str(tmp_path / "shards"), "--checksums"]) == 2
    said = capsys.readouterr().err
    assert codes(said) == ["HT-archive-wrong-checksum"] and "1d675b47d978889d74fa0da5fadfb00e" in said
    assert not (tmp_path / "shards").exists()

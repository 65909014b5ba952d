"""WebDataset shards of other programs as the source of shards."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from hpctrain.common.shards.listing import WebDatasetTar, tar_files
from support.hostile_files import cost_of
from support.refusals import refused
from support.shard_folders import samples, shard


def write(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def sample(key: str, label: int, ending: str = "jpg") -> dict[str, bytes]:
    return {f"{key}.{ending}": key.encode(), f"{key}.cls": b"%d\n" % label, f"{key}.json": b"{}"}


@pytest.mark.parametrize(
    "names", [("imagenet1k-train-{}.tar", "imagenet1k-validation-0.tar"), ("train/{}.tar", "val/0.tar")]
)
def test_images_keep_their_class_numbers(names: tuple[str, str], tmp_path: Path) -> None:
    source = tmp_path / "source"
    # The keys begin anew in each shard.
    write(source / names[0].format(0), sample("./000/0000", 2) | sample("./000/0001", 0, "JPEG"))
    write(source / names[0].format(1), sample("./000/0000", 1))
    write(source / names[1], sample("n1", 1, "png"))
    assert shard(source, tmp_path / "shards")[0].classes == ("0", "1", "2")
    found = sorted((content, label) for _, label, content in samples(tmp_path / "shards", "train"))
    assert found == [(b"./000/0000", 1), (b"./000/0000", 2), (b"./000/0001", 0)]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.jpg": b"?"}, "a is not an image and its class number"),
        ({"a.jpg": b"?", "a.cls": b"cat"}, "a is not an image and its class number"),
        ({"a.txt": b"?", "a.cls": b"0"}, "a is not an image and its class number"),
        ({"a.jpg": b"?", "a.cls": b"9"}, "the class 9 is in val and not in train"),
    ],
)
def test_what_is_no_image_with_its_class(files: dict[str, bytes], words: str, tmp_path: Path) -> None:
    write(tmp_path / "source" / "train-0.tar", sample("a", 0))
    write(tmp_path / "source" / "val-0.tar", files)
    with refused("HT-source-wrong", words):
        shard(tmp_path / "source", tmp_path / "shards")
    (tmp_path / "source" / "train-0.tar").rename(tmp_path / "source" / "train-0-of-2.tar")
    with refused("HT-source-wrong", "lacks 1 of 2 files: train-1-of-2"):
        shard(tmp_path / "source", tmp_path / "shards")


def _link(kind: bytes) -> bytes:
    info = tarfile.TarInfo("a.jpg")
    info.type, info.linkname = kind, "/etc/passwd"
    return info.tobuf()


def _broken_size(tar: bytes) -> bytes:
    """The size in the first header is nonsense, with its sum put right."""
    content = bytearray(tar)
    content[124:136] = b"\x81" + b"\xff" * 11
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    return bytes(content)


_WRONG = {
    "not a tar": (lambda tar: b"<html>403</html>" * 99, "no tar file"),
    "header of nonsense": (_broken_size, "no tar file, cut short or damaged"),
    "cut in an image": (lambda tar: tar[:700], "cut short or damaged"),
    "cut between files": (lambda tar: tar[:1024], "cut short or damaged at byte 1024"),
    "link": (lambda tar: _link(tarfile.SYMTYPE) + tar[1024:], "a is not an image"),
    "hard link": (lambda tar: _link(tarfile.LNKTYPE) + tar[1024:], "a is not an image"),
    "device": (lambda tar: _link(tarfile.CHRTYPE) + tar[1024:], "a is not an image"),
}


@pytest.mark.parametrize("case", _WRONG)
def test_a_damaged_tar_is_refused(case: str, tmp_path: Path) -> None:
    spoil, words = _WRONG[case]
    path = tmp_path / "train-0.tar"
    write(path, {"a.jpg": b"image", "a.cls": b"0"})
    path.write_bytes(spoil(path.read_bytes()))
    with refused("HT-source-wrong", words, path=path):
        WebDatasetTar(archive=path).members()


def test_names_lead_nowhere(tmp_path: Path) -> None:
    write(tmp_path / "train-0.tar", sample("/../../etc/a", 3))
    (member,) = WebDatasetTar(archive=tmp_path / "train-0.tar").members()
    assert (member.file, member.size, member.label) == (str(tmp_path / "train-0.tar"), 12, 3)
    assert "/" not in member.key and "." not in member.key


def test_a_file_with_holes_is_refused(tmp_path: Path) -> None:
    """It says to be larger than what lies in the archive, so that bytes of others would be read for its own."""
    with (tmp_path / "a.jpg").open("wb") as file:
        file.truncate(1 << 30)
        file.seek(1 << 20)
        file.write(b"image")
    subprocess.run(["tar", "-S", "-cf", "val.tar", "a.jpg"], cwd=tmp_path, timeout=30, check=True)
    with refused("HT-source-wrong", "a.jpg is a sparse file", path=tmp_path / "val.tar"):
        tar_files(tmp_path / "val.tar")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "repeated", "size"), [(tarfile.XHDTYPE, 1, 8 << 30), (tarfile.GNUTYPE_LONGNAME, 3000, 0)]
)
def test_headers_of_more_than_a_listing_holds(kind: bytes, repeated: int, size: int, tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.jpg")
    info.type, info.size = kind, 7 << 30 if size else 5
    path = tmp_path / "val.tar"
    path.write_bytes((info.tobuf(tarfile.USTAR_FORMAT) + b"a".ljust(512, b"\0")) * repeated)
    os.truncate(path, size or path.stat().st_size)
    program = (
        "import sys; from pathlib import Path; from hpctrain.common.shards.listing import *; "
        "list_part(WebDatasetTar(archive=Path(sys.argv[1])))"
    )
    cost = cost_of(program, str(path))
    assert cost.status == 1 and "HpctrainError" in cost.stderr, cost.stderr
    assert cost.peak < 6e8

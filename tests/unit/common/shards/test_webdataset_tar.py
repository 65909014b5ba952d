"""WebDataset shards of other programs as the source of shards."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

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

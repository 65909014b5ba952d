"""What somebody else put in place of a file of a data set or of shards is refused at once, and takes no memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.common.shards.decoding import MOST_BYTES
from hpctrain.common.shards.folders import verify_folder
from hpctrain.common.shards.image_shards import open_shards
from hpctrain.common.shards.listing import ClassFolder, list_part
from hpctrain.common.shards.manifest import INDEX_ROW, MOST_MANIFEST_BYTES, read_manifest
from hpctrain.common.shards.stage import stage
from hpctrain.common.shards.text.documents import Span, TextFile, divide, documents
from hpctrain.common.shards.text.prepare import Preparation, prepare_text
from hpctrain.common.shards.text.token_manifest import TokenShards, read_text_manifest
from support.refusals import refused
from support.shard_folders import shard
from support.small_imagenet import write_images


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``source``, ``shards``, ``texts`` and ``tokens``."""
    folder = tmp_path_factory.mktemp("made")
    write_images(folder / "source", images=60, classes=2, size=16)
    shard(folder / "source", folder / "shards", shard_samples=30)
    (folder / "texts").mkdir()
    (folder / "texts" / "a.jsonl").write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(200)))
    preparation = Preparation(
        sources=(folder / "texts",), folder=folder / "tokens", tokenizer="bytes", validation_share=0.2
    )
    prepare_text(preparation, map, lambda words: None)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


def _verified(folder: Path) -> None:
    for name in ("shards", "tokens"):
        if faults := verify_folder(folder / name).faults:
            raise HpctrainError("HT-of-test", "{faults}", faults=faults)


def _opened(folder: Path) -> None:
    for split in ("train", "val"):
        shards = open_shards(folder / "shards", split)
        shards.read(0)
        shards.close()
        TokenShards(folder / "tokens", split).read(0, 5)


def _prepared(folder: Path) -> None:
    work = Preparation(sources=(folder / "texts",), folder=folder / "new", tokenizer="bytes", validation_share=0.2)
    prepare_text(work, map, lambda words: None)


def _staged(folder: Path) -> None:
    stage(folder / "shards", folder / "staged", wait_seconds=1, check=True)


@pytest.mark.parametrize(
    ("name", "reading"),
    [
        ("shards/manifest.json", _verified),
        ("shards/manifest.json", _opened),
        ("shards/manifest.json", _staged),
        ("shards/train-index.npy", _verified),
        ("shards/train-index.npy", _opened),
        ("shards/train-index.npy", _staged),
        ("shards/train-000000.tar", _verified),
        ("shards/train-000000.tar", _opened),
        ("shards/train-000000.tar", _staged),
        ("tokens/manifest.json", _verified),
        ("tokens/manifest.json", _opened),
        ("tokens/train-000000.bin", _verified),
        ("tokens/train-000000.bin", _opened),
        ("texts/a.jsonl", _prepared),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_pipe_is_not_waited_for(name: str, reading: Callable[[Path], None], folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(HpctrainError):
        reading(folder)


def test_an_image_of_30_gigabytes_is_refused_when_it_is_listed(tmp_path: Path) -> None:
    with (tmp_path / "a.jpg").open("wb") as file:
        file.truncate(30 * 10**9)
    with refused("HT-source-wrong", str(30 * 10**9), path=tmp_path / "a.jpg"):
        list_part(ClassFolder(folder=tmp_path, label=0))


def _index(rows: int, path: Path, size: int) -> None:
    row = np.zeros(rows, INDEX_ROW)
    row["size"] = size
    np.save(path, row)


def test_an_index_with_images_that_are_too_large_is_refused(folder: Path) -> None:
    manifest = json.loads((folder / "shards" / "manifest.json").read_text())
    split = manifest["splits"]["val"]
    split["shards"][0]["bytes"] = 1 << 33
    (folder / "shards" / "manifest.json").write_text(json.dumps(manifest))
    os.truncate(folder / "shards" / "val-000000.tar", 1 << 33)
    _index(split["samples"], folder / "shards" / "val-index.npy", MOST_BYTES)
    open_shards(folder / "shards", "val")
    _index(split["samples"], folder / "shards" / "val-index.npy", MOST_BYTES + 1)
    with refused("HT-shard-damaged", path=folder / "shards" / "val-index.npy"):
        open_shards(folder / "shards", "val")


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        b"[" * 1_000_000,
        b'{"format": 1' + b" " * MOST_MANIFEST_BYTES,
    ],
    ids=["nested", "too long"],
)
def test_manifests_of_many_faults(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    for read in (read_manifest, read_text_manifest):
        with pytest.raises(HpctrainError) as caught:
            read(tmp_path)
        assert len(str(caught.value)) < 10_000


def test_lines_and_documents_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.common.shards.text.documents._MOST_LINE_BYTES", 100)
    monkeypatch.setattr("hpctrain.common.shards.text.documents._MOST_DOCUMENT_BYTES", 100)
    fits, longer = (json.dumps({"text": "a" * (size - 12)}).encode() for size in (99, 101))
    path = tmp_path / "a.jsonl"
    path.write_bytes(fits + b"\n" + fits)
    assert len(list(documents(Span(path=path, begin=0, end=199)))) == 2
    with refused("HT-source-wrong", "ends at byte 199, and had 200", path=path):
        list(documents(Span(path=path, begin=0, end=200)))
    path.write_bytes(fits + b"\n" + longer + b"\n" + fits + b"\n")
    with refused("HT-source-wrong", "byte 100 is longer", path=path):
        list(documents(Span(path=path, begin=0, end=500)))
    # One of another span is passed over.
    assert len(list(documents(Span(path=path, begin=150, end=302)))) == 1
    text = tmp_path / "a.txt"
    text.write_bytes(b"\r\nb\r" * 20)
    (whole,) = divide([TextFile(path=text, name="a.txt", size=100)], 10)
    assert list(documents(whole[0])) == [text.read_text()]
    text.write_bytes(b"a" * 101)
    with refused("HT-file-unreadable", path=text):
        list(documents(Span(path=text, begin=0, end=101)))
    path.write_bytes(b"[" * 100)
    with refused("HT-source-wrong", "byte 0 is not a JSON object", path=path):
        list(documents(Span(path=path, begin=0, end=100)))

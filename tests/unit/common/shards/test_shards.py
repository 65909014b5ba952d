"""The reader of shards, on a folder that is written here by hand."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest

from hpctrain.common.shards import image_shards as shards_module
from hpctrain.common.shards.image_shards import Shards, open_shards
from hpctrain.common.shards.manifest import INDEX_ROW, ShardFile, ShardManifest, ShardSettings, Split, read_manifest
from support.refusals import refused

_CONTENTS = [[b"first", b"second, longer"], [b"third" * 1000], [b"4"]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files, rows = [], []
    for number, contents in enumerate(_CONTENTS):
        path = tmp_path / f"train-{number:06}.tar"
        with tarfile.open(path, "w") as tar:
            for content in contents:
                info = tarfile.TarInfo(f"key{len(rows)}.jpg")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        whole = path.read_bytes()
        for content in contents:
            rows.append((number, whole.index(content), len(content), len(rows) % 2, f"key{len(rows)}"))
        files.append(
            ShardFile(name=path.name, samples=len(contents), bytes=len(whole), sha256=hashlib.sha256(whole).hexdigest())
        )
    np.save(tmp_path / "train-index.npy", np.array(rows, INDEX_ROW))
    validation = ShardFile(name="val-000000.tar", samples=1, bytes=0, sha256="")
    manifest = ShardManifest(
        classes=("n1", "n2"),
        splits={
            "train": Split(samples=4, bytes=sum(f.bytes for f in files), index_sha256="", shards=tuple(files)),
            "val": Split(samples=1, bytes=0, index_sha256="", shards=(validation,)),
        },
        broken=(),
        settings=ShardSettings(source="here", listing="", seed=0, shard_bytes=None, shard_samples=2),
    )
    (tmp_path / "manifest.json").write_text(manifest.model_dump_json())
    return tmp_path


def test_each_sample_is_read_in_any_order(folder: Path):
    shards = open_shards(folder, "train")
    assert len(shards) == 4
    assert shards.labels.tolist() == [0, 1, 0, 1]
    assert shards.classes == ("n1", "n2")
    everything = sum(_CONTENTS, [])
    for index in (2, 0, 3, 1, 2):
        assert shards.read(index) == everything[index]
        assert shards.key(index) == f"key{index}"
    shards.close()
    assert shards.read(1) == everything[1]
    shards.close()


def test_few_files_are_open_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards_module, "_OPEN_FILES", 2)
    shards = open_shards(folder, "train")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for index in (0, 2, 3, 0, 3, 2):
        assert shards.read(index) == sum(_CONTENTS, [])[index]
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2
    shards.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_pickle_holds_the_path_alone(folder: Path):
    shards = open_shards(folder, "train")
    shards.read(0)
    content = pickle.dumps(shards)
    assert len(content) < 400
    again: Shards = pickle.loads(content)
    assert again.read(2) == shards.read(2)
    shards.close()
    again.close()


def test_what_is_not_whole_is_refused(folder: Path):
    shard = folder / "train-000001.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with refused("HT-shard-damaged", path=shard, problem="cut short: 10239 bytes of 10240") as caught:
        open_shards(folder, "train")
    assert f"hpctrain data verify {folder}" in caught.value.hint
    shard.unlink()
    with refused("HT-shard-damaged", path=shard, problem="No such file or directory"):
        open_shards(folder, "train")
    shard.write_bytes(whole)
    index = folder / "train-index.npy"
    np.save(index, np.zeros(3, INDEX_ROW))
    with refused("HT-shard-damaged", path=index, problem="3 samples where the manifest says 4"):
        open_shards(folder, "train")
    index.write_bytes(b"")
    with refused("HT-shard-damaged", path=index):
        open_shards(folder, "train")
    np.save(index, np.zeros(4))
    with refused("HT-shard-damaged", path=index):
        open_shards(folder, "train")
    with index.open("wb") as file:
        np.savez(file, index=np.zeros(4, INDEX_ROW))
    with refused("HT-shard-damaged", path=index):
        open_shards(folder, "train")


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("shard", 3, "a shard that is not there"),
        ("label", 2, "a label beyond the 2 classes"),
        ("offset", 2**62, "a place outside its shard"),
        ("size", 2**32 - 1, "a place outside its shard"),
    ],
)
def test_an_index_that_names_what_is_not_there_is_refused(folder: Path, column: str, value: int, message: str):
    index = np.load(folder / "train-index.npy")
    index[column][2] = value
    np.save(folder / "train-index.npy", index)
    path = folder / "train-index.npy"
    with refused("HT-shard-damaged", path=path, problem=f"row 2 names {message}") as caught:
        open_shards(folder, "train")
    assert f"hpctrain data stage DIR {folder} --check" in caught.value.hint


_NAME = ("HT-file-value", "splits.train.shards.0.name")
_HOSTILE = {
    "a name that leads out": (lambda m: m["splits"]["train"]["shards"][0].update(name="../../out.tar"), *_NAME),
    "a split that leads out": (
        lambda m: m["splits"].update({"../x": m["splits"]["train"]}),
        "HT-file-value",
        "splits.../x.[key]",
    ),
    "no validation": (lambda m: m["splits"].pop("val"), "HT-shards-inconsistent", ""),
    "a negative size": (
        lambda m: m["splits"]["train"]["shards"][0].update(bytes=-1),
        *("HT-file-value", "splits.train.shards.0.bytes"),
    ),
    "another sum": (lambda m: m["splits"]["train"].update(samples=5), "HT-shards-inconsistent", "splits.train"),
    "one name twice": (
        lambda m: m["splits"]["train"].update(samples=4, shards=[m["splits"]["train"]["shards"][0]] * 2),
        *("HT-shards-inconsistent", "splits.train"),
    ),
}


@pytest.mark.parametrize("case", _HOSTILE)
def test_a_manifest_that_cannot_be_is_refused(folder: Path, case: str):
    change, code, key = _HOSTILE[case]
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with refused(code, where=folder / "manifest.json", key=key):
        read_manifest(folder)


def test_a_shard_that_is_cut_after_it_was_opened(folder: Path):
    shards = open_shards(folder, "train")
    with (folder / "train-000001.tar").open("r+b") as file:
        file.truncate(600)
    with refused("HT-shard-damaged", path=folder / "train-000001.tar", problem="cut short, at key2"):
        shards.read(2)
    shards.close()


def test_a_folder_without_a_manifest(folder: Path):
    (folder / "manifest.json").write_text('{"format": 2}')
    with refused("HT-file-value", where=folder / "manifest.json", key="format"):
        open_shards(folder, "train")
    (folder / "manifest.json").unlink()
    with refused("HT-shards-not-there", folder=folder) as caught:
        open_shards(folder, "train")
    assert f"hpctrain data shard SOURCE {folder}" in caught.value.hint
    with refused("HT-shards-not-there", folder=folder / "nowhere"):
        open_shards(folder / "nowhere", "train")

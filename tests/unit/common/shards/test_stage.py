"""Shards copied to a disk of the node."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.common.files.whole import locked, temporary
from hpctrain.common.shards import stage as stage_module
from hpctrain.common.shards.image_shards import open_shards
from hpctrain.common.shards.stage import StagedFolder, stage
from support.refusals import refused
from support.shard_folders import samples, shard
from support.small_imagenet import write_images


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("staging")
    write_images(folder / "source", images=60, classes=3, size=24)
    shard(folder / "source", folder / "shards", shard_samples=10)
    return folder / "shards"


def _same(one: Path, other: Path) -> None:
    for split in ("train", "val"):
        assert samples(one, split) == samples(other, split)


def test_all_shards_are_copied_once(whole: Path, tmp_path: Path):
    size = sum(path.stat().st_size for path in whole.glob("*.tar"))
    assert stage(whole, tmp_path / "to", wait_seconds=0) == StagedFolder(copied=9, bytes=size, there=0)
    _same(whole, tmp_path / "to")
    files = {path: path.stat().st_ino for path in (tmp_path / "to").glob("*.tar")}
    assert stage(whole, tmp_path / "to", wait_seconds=0) == StagedFolder(copied=0, bytes=0, there=9)
    assert {path: path.stat().st_ino for path in files} == files
    assert main(["data", "verify", str(tmp_path / "to")]) == 0


def test_what_was_interrupted_goes_on(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    to = tmp_path / "to"
    copy, copied = stage_module._copy, []

    def twice(*arguments: object) -> None:
        if len(copied) == 2:
            raise KeyboardInterrupt
        copied.append(copy(*arguments))

    monkeypatch.setattr(stage_module, "_copy", twice)
    with pytest.raises(KeyboardInterrupt):
        stage(whole, to, wait_seconds=0)
    with refused("HT-shards-not-there", folder=to):
        open_shards(to, "train")
    monkeypatch.setattr(stage_module, "_copy", copy)
    temporary(to / "train-000002.tar").write_bytes(b"half")
    done = stage(whole, to, wait_seconds=0)
    assert (done.copied, done.there) == (7, 2)
    _same(whole, to)
    assert {path.name for path in to.iterdir()} == {
        *(path.name for path in whole.glob("*.tar")), "manifest.json", "train-index.npy", "val-index.npy", ".lock"
    }  # fmt: skip


def test_a_damaged_source_is_refused(whole: Path, tmp_path: Path):
    source = shutil.copytree(whole, tmp_path / "source")
    content = bytearray((source / "train-000001.tar").read_bytes())
    content[700] ^= 1
    (source / "train-000001.tar").write_bytes(content)
    with refused("HT-shard-damaged", path=source / "train-000001.tar") as caught:
        stage(source, tmp_path / "to", wait_seconds=0)
    assert caught.value.exit_code == 3
    assert not (tmp_path / "to/train-000001.tar").exists()
    assert not (tmp_path / "to/manifest.json").exists()


def test_a_damaged_copy_is_mended_by_the_command_that_verify_names(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    to = tmp_path / "to"
    stage(whole, to, wait_seconds=0)
    content = bytearray((to / "train-000001.tar").read_bytes())
    content[700] ^= 1
    (to / "train-000001.tar").write_bytes(content)
    (to / "train-index.npy").unlink()
    with refused("HT-shard-damaged", path=to / "train-index.npy") as caught:
        open_shards(to, "train")
    assert f"hpctrain data stage DIR {to} --check" in caught.value.hint
    assert main(["data", "verify", str(to), "--json"]) == 3
    command = json.loads(capsys.readouterr().out)["remedy"].replace("DIR", str(whole), 1).split()
    assert main(command[1:]) == 0
    assert "2 files" in capsys.readouterr().out
    assert main(["data", "verify", str(to)]) == 0
    _same(whole, to)


def test_misuse(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with refused("HT-stage-wrong", "to itself"):
        stage(whole, whole, wait_seconds=0)
    with refused("HT-shards-not-there", folder=tmp_path / "none"):
        stage(tmp_path / "none", tmp_path / "to", wait_seconds=0)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("")
    with refused("HT-output-exists", folder=tmp_path / "full", others="thesis.tex"):
        stage(whole, tmp_path / "full", wait_seconds=0)
    other = shutil.copytree(whole, tmp_path / "other")
    (other / "manifest.json").write_text((other / "manifest.json").read_text().replace('"seed": 0', '"seed": 1'))
    stage(other, tmp_path / "to", wait_seconds=0)
    with refused("HT-stage-wrong", f"{tmp_path / 'to'} holds another set"):
        stage(whole, tmp_path / "to", wait_seconds=0)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with refused("HT-disk-full", done="copied", free=1e-06):
        stage(whole, tmp_path / "small", wait_seconds=0)
    assert not list((tmp_path / "small").glob("*.tar"))


def test_one_process_copies_and_others_wait(whole: Path, tmp_path: Path):
    to = tmp_path / "to"
    results: list[StagedFolder] = []
    threads = [threading.Thread(target=lambda: results.append(stage(whole, to, wait_seconds=60))) for _ in range(3)]
    with locked(to, seconds=0):
        for thread in threads:
            thread.start()
        with refused("HT-folder-in-use", folder=to, waited=", waited 0.3 s for it"):
            stage(whole, to, wait_seconds=0.3)
        assert not results
    for thread in threads:
        thread.join()
    assert sorted(result.copied for result in results) == [0, 0, 9]
    _same(whole, to)

"""Shards of a small set: against the source as tarfile and webdataset read it, resumed, damaged, misused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cli.main import main
from hpctrain.common.files.whole import temporary
from hpctrain.common.shards import make as sharding
from hpctrain.common.shards.decoding import look
from hpctrain.common.shards.image_shards import open_shards
from hpctrain.common.shards.listing import ImageFile
from hpctrain.common.shards.make import cut_shards, divided, drawn
from hpctrain.common.shards.manifest import Shrinking
from hpctrain.common.shards.one_shard import tar_bytes
from support.refusals import refused
from support.shard_folders import contents, samples, shard
from support.small_imagenet import write_images

Sample = tuple[str, int, bytes]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("it's odd") / "source"
    write_images(folder, images=120, classes=4, size=32, broken=2)
    return folder


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards that tests read and do not change."""
    folder = tmp_path_factory.mktemp("whole") / "shards"
    shard(source, folder)
    return folder


@pytest.fixture
def shards(whole: Path, tmp_path: Path) -> Path:
    """Shards of a test's own."""
    return Path(shutil.copytree(whole, tmp_path / "shards"))


def _of_source(source: Path) -> dict[str, list[Sample]]:
    """Key, label and content of each image in the order of the folders."""
    found: dict[str, list[Sample]] = {}
    for split in ("train", "val"):
        for label, folder in enumerate(sorted((source / split).iterdir())):
            images = [(path.stem, label, path.read_bytes()) for path in sorted(folder.iterdir())]
            found.setdefault(split, []).extend(images)
    return found


def _by_webdataset(folder: Path, split: str) -> list[Sample]:
    urls = sorted(str(path) for path in folder.glob(f"{split}-*.tar"))
    dataset = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
    return [(sample["__key__"], int(sample["cls"]), sample["jpg"]) for sample in dataset]


def test_webdataset_and_the_reader_see_what_the_folders_hold(source: Path, whole: Path):
    wanted = _of_source(source)
    for split, images in wanted.items():
        read = _by_webdataset(whole, split)
        assert sorted(read) == sorted(images)
        assert samples(whole, split) == read
    assert _by_webdataset(whole, "val") == wanted["val"]


def test_training_is_mixed_and_broken_images_are_named(whole: Path, source: Path):
    labels = open_shards(whole, "train").labels
    # Of four classes, 20 images drawn at random lack one rarely, and never two.
    assert all(len(set(labels[start : start + 20].tolist())) >= 3 for start in range(0, 100, 20))
    manifest, _ = shard(source, whole)
    assert len(manifest.broken) == 2
    assert {image.split for image in manifest.broken} == {"train"}
    assert [shard.samples for shard in manifest.splits["train"].shards] == [20, 20, 20, 20, 20, 8]
    assert [shard.samples for shard in manifest.splits["val"].shards] == [12]


def test_what_systems_leave_in_folders_of_images(tmp_path: Path):
    tree = tmp_path / "tree"
    for number, (split, name) in enumerate((split, name) for split in ("train", "val") for name in ("a", "b")):
        (tree / split / name / "@eaDir").mkdir(parents=True)
        (tree / split / name / "one.jpg").write_bytes(b"%d" % number)
        (tree / split / name / "Thumbs.db").touch()
        (tree / split / "desktop.ini").touch()
    # It stays aside.
    (tree / "test" / "unlabelled").mkdir(parents=True)
    manifest, _ = shard(tree, tmp_path / "shards")
    assert manifest.classes == ("a", "b")
    val = _by_webdataset(tmp_path / "shards", "val")
    assert [(label, content) for _, label, content in val] == [(0, b"2"), (1, b"3")]


def test_classes_and_images_of_any_name(tmp_path: Path):
    # The first two are of CUB-200-2011 and Stanford Dogs; torchvision numbers folders in the order of their names.
    names = [
        "001.Black_footed_Albatross",
        "n02093428-American_Staffordshire_terrier",
        "10",
        "2",
        "Zebra",
        "a b",
        "日本",
    ]
    wanted: dict[str, list[tuple[int, bytes]]] = {}
    for split in ("train", "val"):
        for label, name in enumerate(sorted(names)):
            (tmp_path / "tree" / split / name).mkdir(parents=True)
            # They differ behind the bytes that a key has.
            for number, suffix in enumerate((".jpg", ".JPG", ".PnG", ".webp")):
                content = f"{split} {name} {number}".encode()
                path = tmp_path / "tree" / split / name / f"Black_Footed.Albatross_0001_79611_{number}{suffix}"
                path.write_bytes(content)
                wanted.setdefault(split, []).append((label, content))
    manifest, _ = shard(tmp_path / "tree", tmp_path / "shards")
    assert list(manifest.classes) == sorted(names)
    for split, images in wanted.items():
        found = _by_webdataset(tmp_path / "shards", split)
        assert sorted((label, content) for _, label, content in found) == sorted(images)
        assert max(len(key.encode()) for key, *_ in found) == 48


def test_the_seed_orders_training_alone(source: Path, whole: Path, tmp_path: Path):
    shard(source, tmp_path / "other", seed=1)
    assert [s[0] for s in _by_webdataset(tmp_path / "other", "train")] != [s[0] for s in _by_webdataset(whole, "train")]
    assert (tmp_path / "other/val-000000.tar").read_bytes() == (whole / "val-000000.tar").read_bytes()


_members = st.lists(
    st.builds(ImageFile, st.just("f"), st.integers(0, 9), st.integers(0, 5000), st.integers(0, 999), st.text()),
    max_size=40,
)


@given(_members, st.none() | st.integers(1, 20_000), st.none() | st.integers(1, 9))
def test_shards_are_cut_in_order_and_within_limits(members: list[ImageFile], most_bytes: int, most_samples: int):
    groups = cut_shards(members, most_bytes, most_samples)
    assert [member for group in groups for member in group] == members
    for group, behind in zip(groups, [*groups[1:], None], strict=False):
        size = sum(tar_bytes(member.size, member.label) for member in group)
        assert len(group) >= 1
        assert most_samples is None or len(group) <= most_samples
        assert most_bytes is None or size <= most_bytes or len(group) == 1
        if behind:
            more = size + tar_bytes(behind[0].size, behind[0].label)
            assert len(group) == most_samples or (most_bytes is not None and more > most_bytes)


def test_a_shard_has_the_size_that_was_reckoned(whole: Path):
    for path in whole.glob("*.tar"):
        with tarfile.open(path) as tar:
            images = [member for member in tar if member.name.endswith(".jpg")]
        # tarfile fills the end up to a record.
        reckoned = sum(tar_bytes(image.size, 0) for image in images) + 2 * tarfile.BLOCKSIZE
        assert -(-reckoned // tarfile.RECORDSIZE) * tarfile.RECORDSIZE == path.stat().st_size


def test_what_was_interrupted_goes_on(source: Path, whole: Path, tmp_path: Path):
    def until_the_fourth(function: Callable[[Any], Any], tasks: Any) -> Iterator[Any]:
        for number, task in enumerate(tasks):
            if isinstance(task, sharding.ShardTask) and number == 3:
                raise KeyboardInterrupt
            yield function(task)

    folder = tmp_path / "shards"
    with pytest.raises(KeyboardInterrupt):
        shard(source, folder, until_the_fourth)
    temporary(folder / "train-000003.tar").write_bytes(b"half")
    # A shard whose record was not written yet is made again.
    (folder / "records/train-000002.tar.json").unlink()
    with refused("HT-shards-not-there", folder=folder):
        open_shards(folder, "train")
    _, said = shard(source, folder)
    assert re.findall(r"\d+", said[-1]) == ["7", "7", "5"]
    assert contents(folder) == contents(whole)


def test_damage_is_found_and_mended(source: Path, shards: Path, whole: Path, capsys: pytest.CaptureFixture[str]):
    flipped, short = shards / "train-000001.tar", shards / "val-000000.tar"
    content = bytearray(flipped.read_bytes())
    content[5000] ^= 1
    flipped.write_bytes(content)
    os.truncate(short, 4096)
    (shards / "train-000004.tar").unlink()
    index = shards / "train-index.npy"
    index.write_bytes(index.read_bytes()[:-1] + b"x")
    assert main(["data", "verify", str(shards)]) == 3
    said = capsys.readouterr().err
    assert "train-000001.tar: changed" in said
    assert re.search(rf"val-000000\.tar: .* 4096 .* {(whole / short.name).stat().st_size}", said)
    assert "train-000004.tar: " in said
    assert "train-index.npy: changed" in said
    assert main(["data", "verify", str(shards), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "failed"
    assert sorted(fault["file"] for fault in found["faults"]) == sorted(
        ["train-000001.tar", "val-000000.tar", "train-000004.tar", "train-index.npy"]
    )
    untouched = {path: path.stat().st_ino for path in shards.glob("train-00000[0235].tar")}
    assert subprocess.run(["bash", "-c", f"PATH={_bin()}:$PATH; {found['remedy']}"], check=True).returncode == 0
    assert {path: path.stat().st_ino for path in untouched} == untouched
    assert contents(shards) == contents(whole)
    assert main(["data", "verify", str(shards)]) == 0
    assert re.findall(r"\d+ \w+", capsys.readouterr().out.rpartition(": ok, ")[2]) == [
        "7 shards",
        "108 images",
        "12 images",
    ]


def _bin() -> str:
    import sys

    return str(Path(sys.executable).parent)


def test_a_source_that_moved_is_noted(source: Path, shards: Path, whole: Path, tmp_path: Path):
    moved = shutil.copytree(source, tmp_path / "moved")
    manifest, said = shard(moved, shards)
    assert re.findall(r"\d+", said[-1])[-1] == "0"
    assert manifest.settings.source == str(moved)
    assert json.loads((shards / "sharding.json").read_text())["source"] == str(moved)
    kept = {name: content for name, content in contents(shards).items() if not name.endswith("ing.json")}
    assert {name: content for name, content in contents(whole).items() if name in kept} | {
        "manifest.json": kept["manifest.json"]
    } == kept


def test_a_shard_and_its_record_in_the_place_of_another_are_made_again(source: Path, shards: Path, whole: Path):
    for name, other in (("train-000001.tar", "train-000002.tar"), ("records/{}.json", "records/{}.json")):
        one, two = (text.format(f"train-00000{number}.tar") for text, number in ((name, 1), (other, 2)))
        shutil.copy(shards / two, shards / one)
    _, said = shard(source, shards)
    assert re.findall(r"\d+", said[-1]) == ["7", "7", "1"]
    assert contents(shards) == contents(whole)


def test_other_settings_and_other_folders_are_refused(source: Path, shards: Path, tmp_path: Path):
    before = contents(shards)
    for settings, what in (({"seed": 1}, "seed"), ({"shard_samples": 21}, "shard_samples")):
        with refused("HT-shards-begun-otherwise", folder=shards, settings=what) as caught:
            shard(source, shards, **settings)
        assert "--shard-samples 20 --seed 0" in caught.value.hint
    other = tmp_path / "other"
    write_images(other, images=40, classes=4, size=16, seed=9)
    with refused("HT-shards-begun-otherwise", folder=shards, settings="images or texts"):
        shard(other, shards)
    assert contents(shards) == before
    with refused("HT-output-exists", folder=other):
        shard(source, other)


def test_photographs_are_shrunk_and_the_settings_kept(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    folder, smaller = tmp_path / "shards", Shrinking(short_side=16, quality=80)
    manifest, _ = shard(source, folder, shrinking=smaller)
    assert manifest.settings.shrinking == smaller
    broken = {image.key for image in manifest.broken}
    assert len(broken) == 2
    before = {key: content for samples in _of_source(source).values() for key, _, content in samples}
    counts = {False: 0, True: 0}
    for split in ("train", "val"):
        shards = open_shards(folder, split)
        for index in range(len(shards)):
            content, key = shards.read(index), shards.key(index)
            if key in broken:
                assert content == before[key]
                continue
            (width, height, pixels), original = look(content), look(before[key])
            assert pixels is None and min(width, height) == min(16, original.width, original.height)
            kept = original.pixels is None and min(original.width, original.height) <= 16
            assert kept or content != before[key]
            counts[kept] += 1
        shards.close()
    assert all(counts.values())
    made = contents(folder)
    (folder / "train-000001.tar").unlink()
    assert shard(source, folder, shrinking=smaller)[1][-1].endswith("1 of them made now")
    assert contents(folder) == made
    for other in (None, Shrinking(short_side=17, quality=80), Shrinking(short_side=16, quality=81)):
        with refused("HT-shards-begun-otherwise", folder=folder, settings="shrinking") as caught:
            shard(source, folder, shrinking=other)
        assert "--short-side 16 --quality 80" in caught.value.hint
    assert main(["data", "verify", str(folder)]) == 0
    assert "short side of 16 pixels" in capfd.readouterr().out
    (folder / "val-000000.tar").write_bytes(b"")
    assert main(["data", "verify", "--json", str(folder)]) == 3
    assert "--short-side 16 --quality 80" in json.loads(capfd.readouterr().out)["remedy"]


# Files and folders of a source (which end in a slash), and the one that is named with some words.
_FOLDERS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    ((), "", "holds neither class folders nor"),
    (("train/n1/",), "val", "is not there"),
    (("train/n1/", "val/n2/"), "", "n1, n2"),
    (("train/n1/", "val/n1/"), "train/n1", "holds no image"),
    (("train/n1/one.JPEG", "val/n1/notes.txt"), "val/n1/notes.txt", "is not an image"),
    (("train/n1/one.JPEG", "val/notes.txt"), "val/notes.txt", "is not the folder of a class"),
    (("train/n1/one.JPEG", "val/"), "val", "has no folder of a class"),
    (("train/n1/n1_1.JPEG", "train/n1/n1_1.jpg", "val/n1/1.jpg"), "train/n1/n1_1.JPEG", "2 images have the name n1_1"),
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
    assert not (tmp_path / "shards").exists()


@pytest.mark.parametrize("share", [0.001, 0.2, 0.5, 0.999])
def test_one_tree_is_divided_by_the_hashes_of_names_and_each_class_has_some_of_each(share: float):
    classes = [[ImageFile("f", 0, 1, label, f"{label}_{n}") for n in range(2 + label % 9)] for label in range(500)]
    found = divided(Path("photos"), [str(label) for label in range(500)], classes, share)
    for whole, train, val in zip(classes, found["train"], found["val"], strict=True):
        assert train and val
        assert sorted([*train, *val]) == sorted(whole)
        by_hash = [image for image in whole if drawn(image.key) < share * 2**64]
        assert val == by_hash or len(val) == 1 or len(train) == 1


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (("cat/1.png", "dog/1.png", "dog/2.png"), "has one image"),
        (("train/cat/1.png", "val/cat/2.png"), "is divided into train and val already"),
    ],
)
def test_one_tree_that_cannot_be_divided_is_refused(paths: tuple[str, ...], words: str, tmp_path: Path):
    for path in paths:
        (tmp_path / "source" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / path).touch()
    with refused("HT-source-wrong", words):
        shard(tmp_path / "source", tmp_path / "shards", validation_share=0.2)

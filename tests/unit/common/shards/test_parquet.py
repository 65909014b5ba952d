"""Shards of Parquet files: against what was written into them, resumed, damaged, misused."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpctrain.cli.main import main
from hpctrain.common.shards.image_shards import open_shards
from hpctrain.common.shards.manifest import ShardManifest
from hpctrain.common.shards.one_shard import ShardTask
from support.refusals import refused
from support.shard_folders import contents, samples, shard

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

_CLASSES = ("cat", "dog", "owl")


def _image(number: int) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (6, 5 + number % 3, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


IMAGES = [_image(number) for number in range(60)]
LABELS = [number % 3 for number in range(60)]


def write(
    path: Path,
    images: Sequence[bytes | None],
    labels: Sequence[Any],
    *,
    names: tuple[str, str] = ("image", "label"),
    struct: bool = False,
    rows: int = 7,
    metadata: dict[bytes, bytes] | None = None,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = [{"bytes": image, "path": "a.jpg"} for image in images] if struct else list(images)
    table = pyarrow.table({"further": range(len(images)), names[0]: values, names[1]: labels})
    parquet.write_table(table.replace_schema_metadata(metadata), path, row_group_size=rows)


def _noted(names: Iterable[str]) -> dict[bytes, bytes]:
    """The classes, as `datasets` notes them."""
    return {b"huggingface": json.dumps({"info": {"features": {"label": {"names": list(names)}}}}).encode()}


def _make(source: Path, folder: Path, run: Any = map, **options: Any) -> ShardManifest:
    return shard(source, folder, run, **{"shard_samples": 4, **options})[0]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two files of train and one of val, as `datasets` writes them."""
    folder = tmp_path / "source"
    noted = _noted(_CLASSES)
    write(folder / "data" / "train-00000-of-00002.parquet", IMAGES[:25], LABELS[:25], struct=True, metadata=noted)
    write(folder / "data" / "train-00001-of-00002.parquet", IMAGES[25:50], LABELS[25:50], struct=True, metadata=noted)
    write(folder / "data" / "validation-00000-of-00001.parquet", IMAGES[50:], LABELS[50:], struct=True)
    write(folder / "data" / "test-00000-of-00001.parquet", IMAGES[:3], [-1] * 3, struct=True)
    return folder


def test_each_image_is_there_once_with_its_label(source: Path, tmp_path: Path) -> None:
    manifest = _make(source, tmp_path / "shards")
    assert manifest.classes == _CLASSES
    rows = [(0, row) for row in range(25)] + [(1, row) for row in range(25)]
    keys = [f"data_train-{file:05}-of-00002_{row:08}" for file, row in rows]
    train = samples(tmp_path / "shards", "train")
    assert sorted(train) == sorted(zip(keys, LABELS[:50], IMAGES[:50], strict=True))
    # Mixed, over more than a row group.
    assert [key for key, _, _ in train] != keys
    assert len({(key[:25], int(key[-8:]) // 7) for key, _, _ in train[:20]}) > 3
    val = samples(tmp_path / "shards", "val")
    assert [sample[1:] for sample in val] == list(zip(LABELS[50:], IMAGES[50:], strict=True))


def test_a_shard_holds_rows_of_few_row_groups(source: Path, tmp_path: Path) -> None:
    _make(source, tmp_path / "shards", shard_samples=1)
    # Of 8 row groups of at most 7 rows, two make more than 8 shards of one image.
    keys = [key for key, _, _ in samples(tmp_path / "shards", "train")]
    assert all(len({(key[:25], int(key[-8:]) // 7) for key in keys[start : start + 8]}) <= 4 for start in range(40))


def test_the_bytes_depend_on_seed_and_sizes_alone(source: Path, tmp_path: Path) -> None:
    def backwards(function: Any, items: Any) -> list[Any]:
        return [function(item) for item in list(items)[::-1]][::-1]

    _make(source, tmp_path / "shards")
    _make(source, tmp_path / "other", backwards)
    wanted = contents(tmp_path / "shards")
    assert contents(tmp_path / "other") == wanted
    (tmp_path / "other" / "train-000003.tar").unlink()
    (tmp_path / "other" / "train-000005.tar").write_bytes(b"damaged")
    _make(source, tmp_path / "other")
    assert contents(tmp_path / "other") == wanted
    _make(source, tmp_path / "seeded", seed=1)
    assert contents(tmp_path / "seeded")["train-000000.tar"] != wanted["train-000000.tar"]


def test_columns_of_other_names_and_labels_of_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    for split, images in (("train", IMAGES[:9]), ("val", IMAGES[9:12])):
        labels = [_CLASSES[number % 3] for number in range(len(images))]
        write(source / split / "one.parquet", images, labels, names=("jpeg", "kind"))
    command = ["data", "shard", str(source), str(tmp_path / "shards"), "--shard-samples", "4"]
    with refused("HT-source-wrong", "no column 'image', but 'further', 'jpeg', 'kind'") as caught:
        _make(source, tmp_path / "shards")
    assert "--image-column" in caught.value.hint
    assert main([*command, "--image-column", "jpeg", "--label-column", "kind"]) == 0
    assert open_shards(tmp_path / "shards", "train").classes == _CLASSES
    assert sorted(label for _, label, _ in samples(tmp_path / "shards", "train")) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert main([*command, "--image-column", "jpeg", "--label-column", "further"]) == 2
    assert "--image-column jpeg --label-column kind" in capsys.readouterr().err


def test_names_of_files_as_other_programs_give_them(tmp_path: Path) -> None:
    source = tmp_path / "source"
    # A folder, as Spark writes a table, with what macOS leaves beside a file.
    write(source / "train.parquet" / "part-00000.snappy.parquet", IMAGES[:4], LABELS[:4])
    (source / "train.parquet" / "._part-00000.snappy.parquet").write_bytes(b"no Parquet")
    (source / "train.parquet" / "_delta_log").mkdir()
    (source / "train.parquet" / "_delta_log" / "0.checkpoint.parquet").write_bytes(b"no images")
    # Names with hashes, which begin alike and are longer than a key.
    names = [f"validation-00000-of-00001-{digit * 16}.parquet" for digit in "ab"]
    for number, name in enumerate(names):
        write(source / "data" / name, IMAGES[4 + number : 5 + number], [number])
    _make(source, tmp_path / "shards")
    train = samples(tmp_path / "shards", "train")
    assert sorted(sample[1:] for sample in train) == sorted(zip(LABELS[:4], IMAGES[:4], strict=True))
    val = samples(tmp_path / "shards", "val")
    assert [sample[1:] for sample in val] == [(0, IMAGES[4]), (1, IMAGES[5])]
    assert all(key.startswith("data_validation-00000-of-0") and key.endswith("_00000000") for key, _, _ in val)


def test_row_groups_and_files_without_rows(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write(source / "val.parquet", IMAGES[3:5], [0, 1])
    whole = pyarrow.table({"image": IMAGES[:3], "label": LABELS[:3]})
    with parquet.ParquetWriter(source / "train-0.parquet", whole.schema) as writer:
        for rows in (whole[:1], whole[:0], whole[1:]):
            writer.write_table(rows)
    assert parquet.ParquetFile(source / "train-0.parquet").num_row_groups == 3
    parquet.write_table(whole[:0], source / "train-1.parquet")
    _make(source, tmp_path / "shards")
    keys = sorted(key for key, _, _ in samples(tmp_path / "shards", "train"))
    assert keys == [f"train-0_{row:08}" for row in range(3)]


def test_a_test_set_validates_where_there_is_no_other(tmp_path: Path) -> None:
    # Numbered from 1, as some programs do.
    write(tmp_path / "source" / "train_1_of_1.parquet", IMAGES[:3], LABELS[:3])
    write(tmp_path / "source" / "test.parquet", IMAGES[3:6], LABELS[3:6])
    shard(tmp_path / "source", tmp_path / "shards")
    assert [sample[2] for sample in samples(tmp_path / "shards", "val")] == IMAGES[3:6]


@pytest.mark.parametrize(
    ("train", "val", "words"),
    [
        (["cat", "dog"], ["cat", "Dog"], "'Dog': a class only in val"),
        # One numbered from 0, the other from 1.
        ([0, 1], [1, 2], "2: a class only in val"),
        ([1, 2], [0, 1], "0: a class only in val"),
        ([0, -1], [0, 1], "row 1 of row group 0 has the label -1"),
        ([True, False], [0, 1], "row 0 of row group 0 has the label True"),
    ],
)
def test_labels_that_are_no_classes(train: list[Any], val: list[Any], words: str, tmp_path: Path) -> None:
    write(tmp_path / "source" / "train.parquet", IMAGES[:2], train)
    write(tmp_path / "source" / "val.parquet", IMAGES[:2], val)
    with refused("HT-source-wrong", words):
        _make(tmp_path / "source", tmp_path / "shards")


def _overwrite(source: Path) -> None:
    path = source / "data" / "train-00001-of-00002.parquet"
    content = bytearray(path.read_bytes())
    content[100:400] = b"\xff" * 300
    path.write_bytes(content)


def _train_x(images: list[Any], labels: list[Any]) -> Any:
    return lambda source: write(source / "data" / "train-x.parquet", images, labels, struct=True)


# What is done to the source, the file that is named, and some words of the message.
_WRONG: tuple[tuple[Any, str, str], ...] = (
    (_overwrite, "data/train-00001-of-00002.parquet", "cannot be read"),
    (_train_x([IMAGES[0], None], [0, 1]), "data/train-x.parquet", "row 1 has no image"),
    (_train_x(IMAGES[:2], [0, None]), "data/train-x.parquet", "has the label None"),
    (_train_x(IMAGES[:2], [0, 3]), "data/train-00000-of-00002.parquet", "has the label 3, and 3 classes have names"),
    (_train_x(IMAGES[:2], ["a", "b"]), "", "labels are numbers in one file and text in another"),
    (
        lambda source: write(source / "data" / "train-x.parquet", [1, 2], [0, 1]),
        *("data/train-x.parquet", "row 0 has no image in the column 'image'"),
    ),
    (
        lambda source: write(source / "val-x.parquet", IMAGES[:1], [0], metadata=_noted(reversed(_CLASSES))),
        *("data/train-00000-of-00002.parquet", "val-x.parquet names the classes differently"),
    ),
    # The labels of a test set are often missing.
    (
        lambda source: next(source.rglob("val*")).unlink(),
        *("data/test-00000-of-00001.parquet", "has the label -1"),
    ),
    (lambda source: write(source / "data" / "other.parquet", IMAGES[:2], [0, 1]), "data/other.parquet", "which split"),
    (
        lambda source: write(source / "train" / "val-0.parquet", IMAGES[:2], [0, 1]),
        *("train/val-0.parquet", "its folder says train, and its name val"),
    ),
    (
        lambda source: [write(source / name, IMAGES[:1], [0]) for name in ("train_a.parquet", "train/a.parquet")],
        *("train/a.parquet", "2 images have the name train_a_00000000"),
    ),
    (
        lambda source: [path.unlink() for path in source.rglob("*.parquet") if "train" not in path.name],
        *("", "has no .parquet file of val"),
    ),
    (lambda source: next(source.rglob("train-00000*")).unlink(), "data", "has 1 of 2 files train-"),
    (
        lambda source: write(source / "train" / "0001_of_0294-ab12.parquet", IMAGES[:1], [0]),
        *("train", "has 1 of 294 files"),
    ),
    (
        lambda source: write(source / "data" / "more" / "train-x.parquet", IMAGES[:1], [0]),
        *("data/more/train-x.parquet", "lies too deep"),
    ),
    (
        lambda source: (source / "train" / "cat").mkdir(parents=True),
        *("", "holds both data/train-00000-of-00002.parquet and train/cat/"),
    ),
)


@pytest.mark.parametrize(("damage", "named", "words"), _WRONG)
def test_wrong_files_are_named(damage: Any, named: str, words: str, source: Path, tmp_path: Path) -> None:
    damage(source)
    with refused("HT-source-wrong", named, words) as caught:
        _make(source, tmp_path / "shards")
    assert caught.value.exit_code == 2
    assert not (tmp_path / "shards").exists()


def test_a_file_that_changes_meanwhile(source: Path, tmp_path: Path) -> None:
    def changes(function: Any, items: Any) -> list[Any]:
        tasks = list(items)
        if isinstance(tasks[0], ShardTask):
            write(source / "data" / "train-00001-of-00002.parquet", IMAGES[:5], LABELS[:5], struct=True)
        return [function(task) for task in tasks]

    with refused("HT-source-wrong", path=source / "data" / "train-00001-of-00002.parquet"):
        _make(source, tmp_path / "shards", changes)

"""Parquet files that are odd within: many row groups, and other numbers of images than of labels."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.common.shards.parquet import Columns, RowGroup, row_groups
from support.refusals import refused

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def test_what_images_and_labels_are_in_files(tmp_path: Path) -> None:
    """Many small row groups: where each begins is not counted anew."""
    path = tmp_path / "train.parquet"
    names = {"info": {"features": {"label": {"names": ["cat", "dog"]}}}}
    table = pa.table({"image": pa.array([b"a"] * 3000, pa.binary()), "label": pa.array([0, 1] * 1500)})
    table = table.replace_schema_metadata({"huggingface": json.dumps(names)})
    pq.write_table(table, path, row_group_size=2)
    classes, parts = row_groups(tmp_path, {"train": [path], "val": [path]}, Columns())
    assert classes == ("cat", "dog")
    assert [part.first for part in parts["train"]] == list(range(0, 3000, 2))


@pytest.mark.parametrize("labels", [(0,), (0, 1, 0, 1)])
def test_other_numbers_of_images_than_labels_are_refused(labels: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"image": pa.array([b"a"] * 3, pa.binary()), "label": pa.array([0, 1, 0])}), path)
    group = RowGroup(file=path, number=0, first=0, labels=labels, name="train", image="image")
    with refused("HT-parquet-wrong", path=path):
        group.members()


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.parquet")
    with pytest.raises(HpctrainError):
        row_groups(tmp_path, {"train": [tmp_path / "train.parquet"], "val": []}, Columns())

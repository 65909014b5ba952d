"""Parquet files of some kilobytes with gigabytes of images, rows or labels in them."""

from __future__ import annotations

import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.common.shards.bounded import memory_limit
from hpctrain.common.shards.confined import call_confined
from hpctrain.common.shards.listing import list_part
from hpctrain.common.shards.parquet import Columns, RowGroup, row_groups
from support.hostile_files import cost_of
from support.refusals import refused

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def _repeated(value: bytes | str, rows: int, kind: object) -> object:
    """A column of one value, which the file has once."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([value], kind))


_TABLES: dict[str, Callable[[], dict[str, object]]] = {
    "an image of 300 MB": lambda: {"image": pa.array([bytes(300_000_000)], pa.binary()), "label": pa.array([0])},
    "an image of 200 MB in 1,000 rows": lambda: {
        "image": _repeated(bytes(200_000_000), 1000, pa.binary()),
        "label": pa.array([0] * 1000),
    },
    "2 million rows": lambda: {
        "image": _repeated(b"a", 2_000_000, pa.binary()),
        "label": pa.array([0] * 2_000_000),
    },
    "labels of 10 GB": lambda: {
        "image": pa.array([b"a"] * 100_000, pa.binary()),
        "label": _repeated("x" * 100_000, 100_000, pa.string()),
    },
    "nested metadata": lambda: {"image": pa.array([b""], pa.binary()), "label": pa.array([0])},
}
_PROGRAM = """
import sys
from pathlib import Path
from hpctrain.common.shards.listing import list_part
from hpctrain.common.shards.parquet import *
file = Path(sys.argv[1])
for parts in row_groups(file.parent, {"train": [file]}, Columns())[1].values():
    for part in parts:
        list_part(part)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", _TABLES)
def test_is_refused_without_its_memory(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    table = pa.table(_TABLES[kind]())
    if kind == "nested metadata":
        table = table.replace_schema_metadata({"huggingface": "[" * 100_000})
    # Without the schema of Arrow, in which the column is one of categories.
    pq.write_table(table, path, compression="zstd", store_schema=kind == "nested metadata")
    assert path.stat().st_size < 300_000
    cost = cost_of(_PROGRAM, str(path))
    assert cost.status == 1 and re.search(r"\.(HpctrainError|BeyondLimitsError): ", cost.stderr), cost.stderr[-3000:]
    assert cost.peak < 2.4e9
    assert cost.cpu < 30


def test_what_images_and_labels_are_in_files(tmp_path: Path) -> None:
    """Many small row groups: where each begins is not counted anew."""
    path = tmp_path / "train.parquet"
    names = {"info": {"features": {"label": {"names": ["cat", "dog"]}}}}
    table = pa.table({"image": pa.array([b"a"] * 3000, pa.binary()), "label": pa.array([0, 1] * 1500)})
    table = table.replace_schema_metadata({"huggingface": json.dumps(names)})
    pq.write_table(table, path, row_group_size=2)
    classes, parts = row_groups(tmp_path, {"train": [path]}, Columns())
    assert classes == ("cat", "dog")
    assert [part.first for part in parts["train"]] == list(range(0, 3000, 2))


def _listed(folder: Path) -> None:
    for part in row_groups(folder, {"train": [folder / "train.parquet"]}, Columns())[1]["train"]:
        list_part(part)


@pytest.mark.slow
@pytest.mark.parametrize("value", [b"D", b"\xff"])
def test_any_byte_may_be_another(value: bytes, tmp_path: Path) -> None:
    """Among them what the library raises as UnicodeDecodeError, and what ends its process."""
    table = pa.table({"image": pa.array([b"a" * 20] * 6, pa.binary()), "label": pa.array([0, 1] * 3)})
    pq.write_table(table, buffer := io.BytesIO(), compression="zstd", data_page_version="2.0", use_dictionary=False)
    whole = buffer.getvalue()
    outcomes = Counter[type[Exception] | None]()
    for place in range(len(whole)):
        (tmp_path / "train.parquet").write_bytes(whole[:place] + value + whole[place + 1 :])
        try:
            call_confined(_listed, tmp_path)
            outcomes[None] += 1
        except HpctrainError as error:
            assert error.exit_code == 2 and str(tmp_path) in str(error.record()["values"])
            outcomes[type(error)] += 1
    assert outcomes[None] and outcomes[HpctrainError]


@pytest.mark.parametrize("labels", [(0,), (0, 1, 0, 1)])
def test_other_numbers_of_images_than_labels_are_refused(labels: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"image": pa.array([b"a"] * 3, pa.binary()), "label": pa.array([0, 1, 0])}), path)
    group = RowGroup(file=path, number=0, first=0, labels=labels, name="train", image="image")
    with refused("HT-parquet-counts-differ", file=path, group=0):
        group.members()


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.parquet")
    with pytest.raises(HpctrainError):
        row_groups(tmp_path, {"train": [tmp_path / "train.parquet"]}, Columns())


def test_the_limit_ends_with_what_it_is_for() -> None:
    # More than the tests before may have left free in the heap.
    with pytest.raises(MemoryError), memory_limit(1 << 24):
        bytearray(1 << 30)
    with memory_limit(1 << 28):
        bytearray(1 << 26)
    bytearray(1 << 30)

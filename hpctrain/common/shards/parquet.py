"""Images in a column of Parquet files, with labels in another, as image sets are published."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.files.regular import open_regular
from hpctrain.common.shards.listing import ImageFile, require_size, short_key
from hpctrain.common.shards.manifest import SplitName, wrong_source

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

# How many rows are in memory at a time; each has up to 67 MB, and is there twice.
_BATCH = 8
# Larger labels do not number classes, and each class needs a name in the manifest.
_MOST_CLASSES = 1 << 20
# How much of a file's name a key has, before a row's 8 digits.
_NAME_BYTES = 39


class Columns(NamedTuple):
    """The names of the columns with the images and with their labels."""

    image: str = "image"
    label: str = "label"


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """The rows of a file that are stored together, the least that can be read of it.

    Attributes:
        number: the number of the row group in the file.
        first: number in the file of its first row.
        name: what the keys of the file's images begin with.
    """

    file: Path
    number: int
    first: int
    labels: tuple[int, ...]
    name: str
    image: str

    def members(self) -> list[ImageFile]:
        """The images in the order of the rows; reads the column, as the sizes of its values stand nowhere else.

        Raises:
            HpctrainError: the file is damaged, or a row has no image.
        """
        images: list[ImageFile] = []
        with _opened(self.file) as file:
            rows = zip(_images(file, self.number, self.image), self.labels, strict=True)
            for row, (content, label) in enumerate(rows, self.first):
                if not content or not isinstance(content, bytes):
                    problem = f"row {row} has no image in the column {self.image!r}, which is binary or has bytes in it"
                    raise wrong_source(self.file, problem, "leave the row out, or --image-column NAME")
                require_size(f"{self.file}, row {row}", len(content))
                images.append(ImageFile(str(self.file), row, len(content), label, f"{self.name}_{row:08}"))
        return images


def row_groups(
    folder: Path, files: Mapping[SplitName, Sequence[Path]], columns: Columns
) -> tuple[tuple[str, ...], dict[SplitName, tuple[RowGroup, ...]]]:
    """The classes, and the row groups of each split; reads the labels alone.

    The classes are those that the files' metadata name for the column (as the library `datasets` writes it), else the
    sorted labels where these are text, else the numbers from 0.

    Raises:
        HpctrainError: a file is damaged or lacks a column, a row has no label, or files disagree about the classes.
    """
    labels: dict[Path, list[list[Any]]] = {}
    names: dict[tuple[str, ...], Path] = {}
    for path in (path for paths in files.values() for path in paths):
        with _opened(path) as file:
            _require_columns(file, path, columns)
            if named := _class_names(file, columns.label):
                names.setdefault(named, path)
            labels[path] = [_labels(file, number, path, columns.label) for number in range(file.num_row_groups)]
    values = {
        split: {label for path in paths for group in labels[path] for label in group} for split, paths in files.items()
    }
    classes = _classes(folder, values["train"], values["val"], names)
    number_of = {name: number for number, name in enumerate(classes)}

    def groups(path: Path) -> Iterator[RowGroup]:
        firsts = accumulate(map(len, labels[path]), initial=0)
        # WebDataset takes all after the first dot for the ending.
        name = short_key("_".join(path.relative_to(folder).with_suffix("").parts).replace(".", "_"), _NAME_BYTES)
        for number, (first, group) in enumerate(zip(firsts, labels[path], strict=False)):
            numbers = tuple(label if isinstance(label, int) else number_of[label] for label in group)
            yield RowGroup(file=path, number=number, first=first, labels=numbers, name=name, image=columns.image)

    return classes, {split: tuple(group for path in paths for group in groups(path)) for split, paths in files.items()}


def read_rows(path: Path, column: str, rows: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """The images of some rows with the rows' numbers, ascending; reads only the row groups that hold some.

    Raises:
        HpctrainError: the file is damaged, or lacks a row.
    """
    wanted = set(rows)
    with _opened(path) as file:
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
        for number, (size, first) in enumerate(zip(sizes, accumulate(sizes, initial=0), strict=False)):
            if not wanted.isdisjoint(range(first, first + size)):
                contents = enumerate(_images(file, number, column), first)
                yield from ((row, content or b"") for row, content in contents if row in wanted)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[ParquetFile]:
    """The file; whatever the library finds damaged in it is an error that names it."""
    from pyarrow.parquet import ParquetFile

    try:
        # Opening it here refuses a pipe, for which the library would wait.
        with open_regular(path), ParquetFile(path) as file:
            yield file
    except HpctrainError:
        raise
    except Exception as error:
        # The library raises whatever its parsing stumbles over: names that are no text, pages that are none.
        problem = f"cannot be read, or is not a complete Parquet file: {error}"
        raise wrong_source(path, problem, "write it again") from error


def _require_columns(file: ParquetFile, path: Path, columns: Columns) -> None:
    names = file.schema_arrow.names
    for option, name in (("--image-column", columns.image), ("--label-column", columns.label)):
        if name not in names:
            problem = f"there is no column {name!r}, but {', '.join(map(repr, names))}"
            raise wrong_source(path, problem, f"{option} NAME says which; {nearest(name, names)}")


def _class_names(file: ParquetFile, column: str) -> tuple[str, ...] | None:
    """The names that `datasets` notes for a column of class numbers."""
    try:
        noted = json.loads((file.schema_arrow.metadata or {})[b"huggingface"])
        return tuple(map(str, noted["info"]["features"][column]["names"]))
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def _labels(file: ParquetFile, group: int, path: Path, column: str) -> list[Any]:
    labels: list[Any] = file.read_row_group(group, columns=[column]).column(column).to_pylist()
    for row, label in enumerate(labels):
        # Not isinstance, as True is an int.
        if type(label) not in (int, str) or (isinstance(label, int) and label < 0):
            problem = f"row {row} of row group {group} has the label {label}"
            raise wrong_source(path, problem, "labels are whole numbers from 0, or text: leave other rows out")
    return labels


def _classes(folder: Path, train: set[Any], val: set[Any], names: Mapping[tuple[str, ...], Path]) -> tuple[str, ...]:
    """The names of the classes by number, from the labels of both splits and the names that files have."""
    labels, numbered = train | val, {int} == {*map(type, train | val)}
    if len({*map(type, labels)}) > 1:
        raise wrong_source(folder, "labels are numbers in one file and text in another", "write them alike")
    if numbered and names:
        classes, *others = names
        if others:
            problem = f"{names[others[0]]} names the classes differently"
            raise wrong_source(names[classes], problem, "number and name them alike in all files")
        if max(labels) >= len(classes):
            problem = f"a row has the label {max(labels)}, and {len(classes)} classes have names"
            raise wrong_source(names[classes], problem, "")
        return classes
    if numbered and max(labels) >= _MOST_CLASSES:
        problem = f"a row has the label {max(labels)}, which is not a class number"
        raise wrong_source(folder, problem, "classes are numbered from 0")
    if untrained := sorted(val - train):
        # The two are spelt differently, or numbered from 0 and from 1.
        problem = f"{', '.join(map(repr, untrained[:3]))}: a class only in val"
        raise wrong_source(folder, problem, "write the labels of train and val alike, or leave its rows out")
    return tuple(map(str, range(max(labels) + 1))) if numbered else tuple(sorted(labels))


def _images(file: ParquetFile, group: int, column: str) -> Iterator[Any]:
    """The values of the column, each the bytes of an image where the file is right."""
    for batch in file.iter_batches(batch_size=_BATCH, row_groups=[group], columns=[column]):
        for value in batch.column(column).to_pylist():
            yield value.get("bytes") if isinstance(value, dict) else value

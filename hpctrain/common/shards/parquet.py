"""Images in a column of Parquet files, with labels in another, as image sets are published."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.files.regular import open_regular
from hpctrain.common.shards.listing import ImageFile, require_size, short_key
from hpctrain.common.shards.manifest import SplitName

if TYPE_CHECKING:
    from pyarrow import DataType
    from pyarrow.parquet import ParquetFile

SUFFIX = ".parquet"
_AGAIN = "write it again"
# How many rows are in memory at a time; each has up to 67 MB, and is there twice.
_BATCH = 8
# Larger labels do not number classes, and each class needs a name in the manifest.
_MOST_CLASSES = 1 << 20
# How much of a file's name a key has, before a row's 8 digits.
_NAME_BYTES = 39


@dataclass(frozen=True, kw_only=True)
class Columns:
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
        found: list[ImageFile] = []
        with _opened(self.file) as file:
            for row, content in enumerate(_images(file, self.number, self.image), self.first):
                if not content:
                    raise HpctrainError(
                        "HT-parquet-no-image",
                        "{file}, row {row}: there is no image in the column {column!r}",
                        "leave the row out of the file",
                        file=self.file,
                        row=row,
                        column=self.image,
                    )
                require_size(f"{self.file}, row {row}", len(content))
                if len(found) == len(self.labels):
                    raise self._differing("more")
                label, key = self.labels[len(found)], f"{self.name}_{row:08}"
                found.append(ImageFile(str(self.file), row, len(content), label, key))
        if len(found) < len(self.labels):
            raise self._differing("fewer")
        return found

    def _differing(self, how: str) -> HpctrainError:
        return HpctrainError(
            "HT-parquet-counts-differ",
            "{file}: row group {group} has {how} images than labels",
            _AGAIN,
            file=self.file,
            group=self.number,
            how=how,
        )


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
    classes = _classes(folder, values, names)
    number_of = {name: number for number, name in enumerate(classes)}
    firsts = {path: [0, *accumulate(map(len, groups))] for path, groups in labels.items()}
    parts: dict[SplitName, tuple[RowGroup, ...]] = {
        split: tuple(
            RowGroup(
                file=path,
                number=number,
                first=firsts[path][number],
                labels=tuple(label if isinstance(label, int) else number_of[label] for label in group),
                name=_name(path.relative_to(folder)),
                image=columns.image,
            )
            for path in paths
            for number, group in enumerate(labels[path])
        )
        for split, paths in files.items()
    }
    return classes, parts


def read_rows(path: Path, column: str, rows: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """The images of some rows with the rows' numbers, ascending; reads only the row groups that hold some.

    Raises:
        HpctrainError: the file is damaged, or lacks a row.
    """
    wanted = sorted(rows)
    with _opened(path) as file:
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
        first = 0
        for number, size in enumerate(sizes):
            after = first + size
            own = {row for row in wanted if first <= row < after}
            if own:
                for row, content in enumerate(_images(file, number, column), first):
                    if row in own:
                        yield row, content or b""
            first = after


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
        raise HpctrainError(
            "HT-parquet-unreadable",
            "{path} cannot be read, or is not a complete Parquet file: {problem}",
            _AGAIN,
            path=path,
            problem=str(error),
        ) from error


def _require_columns(file: ParquetFile, path: Path, columns: Columns) -> None:
    import pyarrow.types as kinds

    schema = file.schema_arrow
    for option, name in (("--image-column", columns.image), ("--label-column", columns.label)):
        if name not in schema.names:
            raise HpctrainError(
                "HT-parquet-no-column",
                "{path} has no column {column!r}, but {columns}",
                f"{option} NAME says which; {nearest(name, schema.names)}",
                path=path,
                column=name,
                columns=", ".join(map(repr, schema.names)),
            )
        if schema.names.count(name) > 1:
            raise HpctrainError(
                "HT-parquet-column-twice",
                "{path} has several columns {column!r}",
                f"rename all but one, or {option} NAME",
                path=path,
                column=name,
            )
    if not _holds_bytes(schema.field(columns.image).type):
        raise HpctrainError(
            "HT-parquet-wrong-type",
            "{path}: the column {column!r} holds {type}",
            "images are binary, or a struct with them as bytes",
            path=path,
            column=columns.image,
            type=str(schema.field(columns.image).type),
        )
    kind = schema.field(columns.label).type
    if kinds.is_dictionary(kind):
        # pandas writes a column of categories so.
        kind = kind.value_type
    if not (kinds.is_integer(kind) or kinds.is_string(kind) or kinds.is_large_string(kind)):
        raise HpctrainError(
            "HT-parquet-wrong-type",
            "{path}: the column {column!r} holds {type}",
            "labels are whole numbers or text",
            path=path,
            column=columns.label,
            type=kind,
        )


def _holds_bytes(kind: DataType) -> bool:
    import pyarrow.types as kinds

    if kinds.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _holds_bytes(kind.field("bytes").type)
    return bool(kinds.is_binary(kind) or kinds.is_large_binary(kind))


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
        if label is None or (isinstance(label, int) and label < 0):
            raise HpctrainError(
                "HT-parquet-bad-label",
                "{path}: row {row} of row group {group} has the label {label}",
                "leave out rows without a label",
                path=path,
                row=row,
                group=group,
                label=label,
            )
    return labels


def _classes(
    folder: Path, values: Mapping[SplitName, set[Any]], names: Mapping[tuple[str, ...], Path]
) -> tuple[str, ...]:
    """The names of the classes by number.

    Args:
        values: the labels of each split.
        names: those that files name, each with one that does.
    """
    found = set[Any]().union(*values.values())
    numbers = [value for value in found if isinstance(value, int)]
    if not numbers:
        _require_trained(folder, values)
        return tuple(sorted(found))
    if len(numbers) < len(found):
        raise HpctrainError(
            "HT-parquet-mixed-labels",
            "{folder}: labels are numbers in one file and text in another",
            "write them alike",
            folder=folder,
        )
    if len(names) > 1:
        one, other = list(names.values())[:2]
        raise HpctrainError(
            "HT-parquet-class-names-differ",
            "{one} and {other} name the classes differently",
            "number and name them alike in all files",
            one=one,
            other=other,
        )
    largest = max(numbers)
    if names:
        (classes,) = names
        if largest >= len(classes):
            raise HpctrainError(
                "HT-parquet-label-without-name",
                "{folder}: a row has the label {label}, and {classes} classes have names",
                folder=folder,
                label=largest,
                classes=len(classes),
            )
        return classes
    if largest >= _MOST_CLASSES:
        raise HpctrainError(
            "HT-parquet-label-too-large",
            "{folder}: a row has the label {label}, which is not a class number",
            "classes are numbered from 0",
            folder=folder,
            label=largest,
        )
    _require_trained(folder, values)
    return tuple(map(str, range(largest + 1)))


def _require_trained(folder: Path, values: Mapping[SplitName, set[Any]]) -> None:
    """Refuse classes of val that train lacks: the two are spelt differently, or numbered from 0 and from 1."""
    train, val = values.get("train", set()), values.get("val", set())
    if train and (others := sorted(val - train)):
        raise HpctrainError(
            "HT-parquet-class-only-in-val",
            "{folder}: {classes}: a class only in val",
            "write the labels of train and val alike, or leave its rows out",
            folder=folder,
            classes=", ".join(map(repr, others[:3])),
        )


def _name(path: Path) -> str:
    """What keys begin with; WebDataset takes all after the first dot for the ending."""
    return short_key("_".join(path.with_suffix("").parts).replace(".", "_"), _NAME_BYTES)


def _images(file: ParquetFile, group: int, column: str) -> Iterator[bytes | None]:
    for batch in file.iter_batches(batch_size=_BATCH, row_groups=[group], columns=[column]):
        for value in batch.column(0).to_pylist():
            yield value.get("bytes") if isinstance(value, dict) else value

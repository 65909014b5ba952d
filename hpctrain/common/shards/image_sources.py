"""Finds the images in a folder, class folders or Parquet files, and which of them validate, by the files' names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.common.extras import require
from hpctrain.common.files.disk import read_error
from hpctrain.common.shards.listing import ClassFolder, SourcePart, is_clutter
from hpctrain.common.shards.manifest import SplitName, wrong_source
from hpctrain.common.shards.parquet import Columns, row_groups

_PARQUET = ".parquet"
_SPLITS: tuple[SplitName, ...] = ("train", "val")
# A word of a file's or folder's name says of which split it is.
_WORD = re.compile(r"(?:^|[^a-z])(train|val|test)")
# The number of a file among those of its split, as `datasets` names them: train-00000-of-00294.parquet.
_OF = re.compile(r"(?P<set>.*?)[0-9]{1,9}[-_]of[-_](?P<of>[0-9]{1,9})(?![0-9])")

_WANTED = (
    "name a folder with train/CLASS/ and val/CLASS/, or with train-….parquet and val-….parquet; "
    "--validation-share 0.2 takes SOURCE/CLASS/ and divides it"
)


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """The images that are to be sharded.

    Attributes:
        classes: their indices are the labels.
        parts: to list of each split, in label order except for Parquet.
        column: of the images in Parquet files, those of one part of which are read together or not at all; None of
            others.
    """

    classes: tuple[str, ...]
    parts: Mapping[SplitName, Sequence[SourcePart]]
    column: str | None = None


def find_source(folder: Path, columns: Columns = Columns(), *, divided: bool = True) -> ImageSource:
    """The source in a folder.

    Args:
        divided: into training and validation; else it holds one folder a class, which are all listed as training.

    Raises:
        HpctrainError: neither of the two or both, a file is missing or wrong, or classes differ between its parts.
    """
    if not folder.is_dir():
        raise wrong_source(folder, "is not a folder", _WANTED)
    try:
        return _divided(folder, columns) if divided else _one_tree(folder)
    except OSError as error:
        raise read_error(error, error.filename, "make it readable") from error


def _divided(folder: Path, columns: Columns) -> ImageSource:
    trees = split_folders(folder)
    tables = split_files(folder)
    # Spark writes other folders beside its Parquet files.
    below = [path for tree in trees.values() for path in sorted(tree.glob("[!._]*")) if path.suffix != _PARQUET]
    classes = next((path for path in below if path.is_dir() and not is_clutter(path.name)), None)
    if tables and classes:
        both = f"holds both {tables['train'][0].relative_to(folder)} and {classes.relative_to(folder)}/"
        raise wrong_source(folder, both, "move one of them elsewhere")
    if tables:
        require("parquet")
        names, groups = row_groups(folder, tables, columns)
        return ImageSource(classes=names, parts=groups, column=columns.image)
    if not trees:
        raise wrong_source(folder, "holds neither class folders nor Parquet files", _WANTED)
    return _trees(folder, trees)


def _one_tree(folder: Path) -> ImageSource:
    names = _class_names(folder)
    if split_folders(folder) and set(names) <= {"train", "val", "test"}:
        problem = f"is divided into {' and '.join(names)} already, and --validation-share would divide it again"
        raise wrong_source(folder, problem, "leave --validation-share out")
    return ImageSource(classes=tuple(names), parts={"train": _folders(folder, names)})


def _trees(folder: Path, trees: Mapping[SplitName, Path]) -> ImageSource:
    classes = {split: _class_names(tree) for split, tree in trees.items()}
    if differing := set(classes["train"]) ^ set(classes["val"]):
        problem = f"{', '.join(sorted(differing)[:3])}: a class in only one of train/ and val/"
        raise wrong_source(folder, problem, "both need the same folders, one per class")
    parts = {split: _folders(tree, classes["train"]) for split, tree in trees.items()}
    return ImageSource(classes=tuple(classes["train"]), parts=parts)


def _folders(tree: Path, classes: Sequence[str]) -> tuple[ClassFolder, ...]:
    return tuple(ClassFolder(folder=tree / name, label=label) for label, name in enumerate(classes))


def _class_names(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise wrong_source(folder, "is not there, or no folder", _WANTED)
    names = sorted(path.name for path in folder.iterdir() if not is_clutter(path.name))
    if not names:
        raise wrong_source(folder, "has no folder of a class", _WANTED)
    if stray := next((name for name in names if not (folder / name).is_dir()), None):
        hint = "the images of a split lie in one folder per class: move them there"
        raise wrong_source(folder / stray, "is not the folder of a class", hint)
    return names


def split_folders(folder: Path) -> dict[SplitName, Path]:
    """The folders of training and validation; empty for a folder that is not divided."""
    folders: dict[SplitName, Path] = {split: folder / split for split in _SPLITS}
    return folders if any(path.is_dir() for path in folders.values()) else {}


def split_files(folder: Path) -> dict[SplitName, list[Path]]:
    """The Parquet files in a folder and in the folders in it, by split and sorted by name; empty if it has none.

    Test splits, which often lack labels, are used only where there is no other to validate with.

    Raises:
        HpctrainError: the name of one does not say of which split it is, or of how many that are not all there; a split
            has none; further ones lie deeper.
    """
    by_split: dict[str, list[Path]] = {}
    # Not searched deeper, because class folders hold a million files.
    for path in sorted([*folder.glob(f"*{_PARQUET}"), *folder.glob(f"*/*{_PARQUET}")]):
        # Spark writes folders whose names end in .parquet.
        if not path.name.startswith(".") and not path.is_dir():
            by_split.setdefault(split_of(path.relative_to(folder)), []).append(path)
    used: dict[SplitName, str] = {"train": "train", "val": "val" if "val" in by_split else "test"}
    files = {split: by_split[of_split] for split, of_split in used.items() if of_split in by_split}
    if not files:
        return {}
    for split in _SPLITS:
        if split not in files:
            raise wrong_source(folder, f"has no {_PARQUET} file of {split}", "both train and val need some")
    deeper = (path for path in folder.glob(f"*/*/**/*{_PARQUET}") if _is_data(path.relative_to(folder)))
    if further := next(filter(Path.is_file, deeper), None):
        problem = f"lies too deep: files are read from {folder} and from the folders in it"
        raise wrong_source(further, problem, "move it to the others of its split, or out of the folder")
    _require_all(path for paths in files.values() for path in paths)
    return files


def _require_all(paths: Iterable[Path]) -> None:
    """Refuse sets of files whose names count more than there are: a download that stopped."""
    matches = [(path.parent, match["set"], int(match["of"])) for path in paths if (match := _OF.match(path.name))]
    for (folder, name, files), count in Counter(matches).items():
        if count < files:
            raise wrong_source(
                folder,
                f"has {count} of {files} files {name}…",
                "download what is missing, or rename the files if they are all that is wanted",
            )


def _is_data(path: Path) -> bool:
    """Whether it has rows: Spark and Delta keep other things in folders such as ``_delta_log``."""
    return not any(part.startswith((".", "_")) for part in path.parts)


def split_of(path: Path) -> str:
    """What a file is called to be of, ``train``, ``val`` or ``test``, by its path in the source."""
    named = [match[1] for part in path.parts if (match := _WORD.search(part))]
    if not named:
        hint = "let train, val or test be in it, as in train-00000.parquet or train/00000.parquet"
        raise wrong_source(path, "neither its name nor its folder says which split it belongs to", hint)
    if len({*named}) > 1:
        raise wrong_source(path, f"its folder says {named[0]}, and its name {named[1]}", "rename one of them")
    return named[0]

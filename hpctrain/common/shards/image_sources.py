"""Finds the images in a folder: ImageNet's original archives, train/ and val/ with class folders, Parquet files, or
WebDataset shards of other programs; and which of them are for training, and which for validation, by their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.common.extras import require
from hpctrain.common.files.disk import read_error
from hpctrain.common.shards.devkit import Devkit, read_devkit
from hpctrain.common.shards.listing import (
    ArchivePart,
    ClassFolder,
    ClassTar,
    ValidationTar,
    WebDatasetTar,
    is_clutter,
    tar_files,
    wrong_archive,
    wrong_source,
)
from hpctrain.common.shards.manifest import SplitName
from hpctrain.common.shards.parquet import Columns, row_groups

TRAIN = "ILSVRC2012_img_train.tar"
VALIDATION = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
ARCHIVES = (TRAIN, VALIDATION, DEVKIT)
_PARQUET = ".parquet"
SPLITS: tuple[SplitName, ...] = ("train", "val")
# The names of the folder of the images that validate.
VALIDATION_FOLDERS = ("val", "valid", "validation")
# A word of a file's or folder's name says of which split it is.
_WORD = re.compile(r"(?:^|[^a-z])(train|val|test)")
# The number of a file among those of its split, as `datasets` names them: train-00000-of-00294.parquet.
_OF = re.compile(r"(?P<set>.*?)(?P<number>[0-9]{1,9})(?P<of>[-_]of[-_][0-9]{1,9})(?![0-9])")

# Of data of one's own, whose images ``hpctrain data shard --validation-share`` divides.
_WANTED_WHOLE = "name a folder with a folder of images for each class, or with train/CLASS/ and val/CLASS/"
_WANTED = (
    f"name a folder with {', '.join(ARCHIVES)}, with train/CLASS/ and val/CLASS/, with train-….parquet and "
    "val-….parquet, or with train-….tar and val-….tar"
)


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """The images that are to be sharded.

    Attributes:
        classes: their indices are the labels; empty where they are numbers that the parts have.
        parts: to list of each split, in label order except for Parquet.
        column: of the images in Parquet files, those of one part of which are read together or not at all; None of
            others.
        validation: the name of the split that validates in the source.
    """

    classes: tuple[str, ...]
    parts: Mapping[SplitName, Sequence[ArchivePart]]
    column: str | None = None
    validation: str = "val"


def find_source(folder: Path, columns: Columns = Columns(), *, divided: bool = True) -> ImageSource:
    """The source in a folder.

    Args:
        divided: into training and validation; else it holds one folder a class, which are all listed as training.

    Raises:
        HpctrainError: none of the four or several, an archive or a file is missing or wrong, or classes differ between
            its parts.
    """
    if not folder.is_dir():
        raise wrong_source(folder, "is not a folder", _WANTED if divided else _WANTED_WHOLE)
    try:
        return _divided(folder, columns) if divided else _one_tree(folder)
    except OSError as error:
        raise read_error(error, error.filename, "make it readable") from error


def _divided(folder: Path, columns: Columns) -> ImageSource:
    archives = [folder / name for name in ARCHIVES if (folder / name).exists()]
    trees = split_folders(folder)
    classes = next(_class_folders(trees.values()), None)
    tables = {} if archives else split_files(folder, _PARQUET)
    files = archives or [path for paths in tables.values() for path in paths]
    if files and classes:
        both = f"holds both {files[0].relative_to(folder)} and {classes.relative_to(folder)}/"
        raise wrong_source(folder, both, "move one of them elsewhere")
    if archives:
        return _archives(folder)
    if by_split := tables or ({} if classes else split_files(folder, ".tar")):
        validation = split_of(by_split["val"][0].relative_to(folder))
        if not tables:
            # Their classes are known once they are listed.
            parts = {split: tuple(WebDatasetTar(archive=path) for path in paths) for split, paths in by_split.items()}
            return ImageSource(classes=(), parts=parts, validation=validation)
        require("parquet")
        names, groups = row_groups(folder, tables, columns)
        return ImageSource(classes=names, parts=groups, column=columns.image, validation=validation)
    if not trees:
        hint = f"{_WANTED}; --validation-share 0.2 takes SOURCE/CLASS/ and divides it"
        problem = "holds neither archives nor folders of ImageNet, nor Parquet files or WebDataset shards"
        raise wrong_source(folder, problem, hint)
    return _trees(folder, trees)


def _class_folders(trees: Iterable[Path]) -> Iterator[Path]:
    """The folders of classes in those of the splits, in which Spark writes others."""
    below = (path for tree in trees for path in tree.glob("*") if path.suffix != _PARQUET)
    return (path for path in below if path.is_dir() and not is_clutter(path.name) and not path.name.startswith("_"))


def _archives(folder: Path) -> ImageSource:
    for name in ARCHIVES:
        if not (folder / name).exists():
            raise wrong_source(folder, f"has no {name}", _WANTED)
    devkit = read_devkit(folder / DEVKIT)
    validation = ValidationTar(archive=folder / VALIDATION, labels=devkit.labels)
    tars = _class_tars(folder / TRAIN, devkit)
    return ImageSource(classes=devkit.classes, parts={"train": tars, "val": (validation,)})


def _class_tars(archive: Path, devkit: Devkit) -> tuple[ClassTar, ...]:
    tars = {Path(info.name).name: info for info in tar_files(archive)}
    wanted = [f"{wnid}.tar" for wnid in devkit.classes]
    for names, problem in ((set(wanted) - set(tars), "lacks"), (set(tars) - set(wanted), "has")):
        if names:
            listed = ", ".join(sorted(names)[:3])
            raise wrong_archive(archive, f"{problem} {listed}, against the {len(wanted)} classes of {DEVKIT}")
    return tuple(ClassTar(archive=archive, info=tars[name], label=label) for label, name in enumerate(wanted))


def _one_tree(folder: Path) -> ImageSource:
    names = _class_names(folder, _WANTED_WHOLE)
    if split_folders(folder) and set(names) <= {"train", "test", *VALIDATION_FOLDERS}:
        problem = f"is divided into {' and '.join(names)} already, and --validation-share would divide it again"
        raise wrong_source(folder, problem, "leave --validation-share out")
    return ImageSource(classes=tuple(names), parts={"train": _folders(folder, names)})


def _trees(folder: Path, trees: Mapping[SplitName, Path]) -> ImageSource:
    classes = {split: _class_names(tree) for split, tree in trees.items()}
    if differing := set(classes["train"]) ^ set(classes["val"]):
        both = " and ".join(f"{tree.name}/" for tree in trees.values())
        problem = f"{', '.join(sorted(differing)[:3])}: a class in only one of {both}"
        raise wrong_source(folder, problem, "both need the same folders, one per class")
    parts = {split: _folders(tree, classes["train"]) for split, tree in trees.items()}
    return ImageSource(classes=tuple(classes["train"]), parts=parts, validation=trees["val"].name)


def _folders(tree: Path, classes: Sequence[str]) -> tuple[ClassFolder, ...]:
    return tuple(ClassFolder(folder=tree / name, label=label) for label, name in enumerate(classes))


def _class_names(folder: Path, wanted: str = _WANTED) -> list[str]:
    if not folder.is_dir():
        raise wrong_source(folder, "is not there, or no folder", wanted)
    names = sorted(path.name for path in folder.iterdir() if not is_clutter(path.name))
    if not names:
        raise wrong_source(folder, "has no folder of a class", wanted)
    if stray := next((name for name in names if not (folder / name).is_dir()), None):
        hint = "the images of a split lie in one folder per class: move them there"
        raise wrong_source(folder / stray, "is not the folder of a class", hint)
    return names


def split_folders(folder: Path) -> dict[SplitName, Path]:
    """The folders of training and validation; empty for a folder that is not divided. A test set validates where there
    is no other.

    Raises:
        HpctrainError: several folders could be that of validation.
    """
    there = [name for name in VALIDATION_FOLDERS if (folder / name).is_dir()]
    if not (folder / "train").is_dir() and "val" not in there:
        return {}
    if len(there) > 1:
        names = " and ".join(f"{name}/" for name in there)
        raise wrong_source(folder, f"has {names}, of which one is to validate", "move the others elsewhere")
    fallback = "test" if (folder / "test").is_dir() else "val"
    return {"train": folder / "train", "val": folder / next(iter(there), fallback)}


def split_files(folder: Path, suffix: str) -> dict[SplitName, list[Path]]:
    """The files in a folder and in the folders in it, by split and in the order of their names; empty if it has none.

    Test splits, which often lack labels, are used only where there is no other to validate with.

    Raises:
        HpctrainError: the name of one does not say of which split it is, or of how many that are not all there; a split
            has none; further ones lie deeper.
    """
    by_split: dict[str, list[Path]] = {}
    # Not searched deeper, because class folders hold a million files.
    for path in sorted([*folder.glob(f"*{suffix}"), *folder.glob(f"*/*{suffix}")]):
        # Spark writes folders whose names end in .parquet.
        if not path.name.startswith(".") and not path.is_dir():
            by_split.setdefault(split_of(path.relative_to(folder)), []).append(path)
    used: dict[SplitName, str] = {"train": "train", "val": "val" if "val" in by_split else "test"}
    files = {split: by_split[of_split] for split, of_split in used.items() if of_split in by_split}
    if not files:
        return {}
    for split in SPLITS:
        if split not in files:
            raise wrong_source(folder, f"has no {suffix} file of {split}", "both train and val need some")
    deeper = (path for path in folder.glob(f"*/*/**/*{suffix}") if _is_data(path.relative_to(folder)))
    if further := next(filter(Path.is_file, deeper), None):
        problem = f"lies too deep: files are read from {folder} and from the folders in it"
        raise wrong_source(further, problem, "move it to the others of its split, or out of the folder")
    _require_all(path for paths in files.values() for path in paths)
    return files


def _require_all(paths: Iterable[Path]) -> None:
    """Refuse sets of files whose names count more than there are: a download that stopped."""
    numbers: dict[tuple[Path, str, str], set[int]] = {}
    for path in paths:
        if match := _OF.match(path.name):
            numbers.setdefault((path.parent, match["set"], match["of"]), set()).add(int(match["number"]))
    for (folder, name, of), there in numbers.items():
        count = int(re.sub("[^0-9]", "", of))
        # Some programs count from 1.
        first = int(count in there)
        if missing := [number for number in range(first, first + count) if number not in there]:
            lacking = f"{name}{missing[0]:0{len(of.lstrip('-_of'))}}{of}"
            raise wrong_source(
                folder,
                f"lacks {len(missing)} of {count} files: {lacking} is not there",
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

"""Finds the images in a folder: ImageNet's original archives, train/ and val/ with class folders, Parquet files, or
WebDataset shards of other programs.
"""

from __future__ import annotations

import hashlib
import tarfile
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import require
from hpctrain.common.files.disk import read_error
from hpctrain.common.files.regular import open_regular
from hpctrain.common.shards.devkit import Devkit, read_devkit
from hpctrain.common.shards.listing import (
    DOWNLOAD_AGAIN,
    ArchivePart,
    ClassFolder,
    ClassTar,
    ValidationTar,
    is_clutter,
    naming,
    open_tar,
    whole_members,
)
from hpctrain.common.shards.manifest import SplitName
from hpctrain.common.shards.parquet import SUFFIX, Columns, row_groups
from hpctrain.common.shards.splits import SPLITS, VALIDATION_FOLDERS, split_files, split_folders, split_of
from hpctrain.common.shards.webdataset_tar import TAR, WebDatasetTar

TRAIN = "ILSVRC2012_img_train.tar"
VALIDATION = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
# As torchvision compares them: https://github.com/pytorch/vision/blob/main/torchvision/datasets/imagenet.py
CHECKSUMS = {
    TRAIN: "1d675b47d978889d74fa0da5fadfb00e",
    VALIDATION: "29b22e2961454d5413ddabcf34fc5622",
    DEVKIT: "fa75699e90414af021442c21a62c3abf",
}

# Of data of one's own, whose images ``hpctrain data shard --validation-share`` divides.
_WANTED_WHOLE = "name a folder with a folder of images for each class, or with train/CLASS/ and val/CLASS/"


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """The images that are to be sharded.

    Attributes:
        classes: their indices are the labels; empty where they are numbers that the parts have.
        parts: to list of each split, in label order except for Parquet.
        columns: of Parquet files, the images of one part of which are read together or not at all; None of others.
        validation: the name of the split that validates in the source.
    """

    classes: tuple[str, ...]
    parts: Mapping[SplitName, Sequence[ArchivePart]]
    columns: Columns | None = None
    validation: str = "val"


def find_source(folder: Path, columns: Columns = Columns(), *, divided: bool = True) -> ImageSource:
    """The source in a folder.

    Args:
        divided: into training and validation; else it holds one folder a class, which are all listed as training.

    Raises:
        HpctrainError: none of the three or several, an archive or a file is missing or wrong, or classes differ between
            its parts.
    """
    if not folder.is_dir():
        raise HpctrainError(
            "HT-source-not-a-folder",
            "{folder} is not a folder",
            _wanted() if divided else _WANTED_WHOLE,
            folder=folder,
        )
    if not divided:
        return _one_tree(folder)
    archives = [name for name in CHECKSUMS if (folder / name).exists()]
    trees = split_folders(folder)
    if archives and trees:
        raise HpctrainError(
            "HT-source-archives-and-folders",
            "{folder} holds both {archive} and {tree}/",
            "move one of them elsewhere",
            folder=folder,
            archive=archives[0],
            tree=next(iter(trees.values())).name,
        )
    try:
        if not archives and (files := split_files(folder, SUFFIX)):
            return _parquet(folder, files, columns)
        classes = (path for tree in trees.values() for path in tree.glob("*") if not is_clutter(path.name))
        if not archives and not any(map(Path.is_dir, classes)) and (tars := split_files(folder, TAR)):
            return _webdataset(folder, tars)
        if not archives and not trees:
            raise HpctrainError(
                "HT-source-unknown",
                "{folder} holds neither archives nor folders of ImageNet, nor Parquet files or WebDataset shards",
                f"{_wanted()}; --validation-share 0.2 takes SOURCE/CLASS/ and divides it",
                folder=folder,
            )
        return _trees(folder, trees) if trees else _archives(folder)
    except OSError as error:
        raise read_error(error, error.filename, "make it readable") from error


def require_checksums(folder: Path) -> None:
    """Compare the archives with the published MD5 sums.

    Raises:
        HpctrainError: one is not there, or differs.
    """
    for name, published in CHECKSUMS.items():
        try:
            with open_regular(folder / name) as file:
                found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        except OSError as error:
            raise read_error(error, folder / name, _wanted()) from error
        if found != published:
            raise HpctrainError(
                "HT-archive-wrong-checksum",
                "{path}: its MD5 sum is {found}, not {published}",
                "download it again",
                path=folder / name,
                found=found,
                published=published,
            )


def _archives(folder: Path) -> ImageSource:
    for name in CHECKSUMS:
        if not (folder / name).exists():
            raise HpctrainError(
                "HT-source-lacks-archive", "{folder} has no {name}", _wanted(), folder=folder, name=name
            )
    devkit = read_devkit(folder / DEVKIT)
    return ImageSource(
        classes=tuple(devkit.samples),
        parts={
            "train": _class_tars(folder / TRAIN, devkit),
            "val": (ValidationTar(archive=folder / VALIDATION, labels=devkit.labels),),
        },
    )


def _class_tars(archive: Path, devkit: Devkit) -> tuple[ClassTar, ...]:
    with open_tar(archive) as tar, naming(str(archive)):
        found: dict[str, tarfile.TarInfo] = {Path(info.name).name: info for info in whole_members(tar, str(archive))}
    wanted = [f"{wnid}.tar" for wnid in devkit.samples]
    for names, what in ((set(wanted) - set(found), "lacks"), (set(found) - set(wanted), "has")):
        if names:
            raise HpctrainError(
                "HT-archive-wrong-classes",
                "{archive} {problem} {classes}, against the {wanted} classes of {devkit}",
                DOWNLOAD_AGAIN,
                archive=archive,
                problem=what,
                classes=", ".join(sorted(names)[:3]),
                wanted=len(wanted),
                devkit=DEVKIT,
            )
    return tuple(
        ClassTar(archive=archive, info=found[name], label=label, samples=samples)
        for label, (name, samples) in enumerate(zip(wanted, devkit.samples.values(), strict=True))
    )


def _one_tree(folder: Path) -> ImageSource:
    try:
        names = _class_names(folder, _WANTED_WHOLE)
    except OSError as error:
        raise read_error(error, error.filename, "make it readable") from error
    if split_folders(folder) and set(names) <= {"train", "test", *VALIDATION_FOLDERS}:
        raise HpctrainError(
            "HT-source-divided-already",
            "{folder} is divided into {splits} already, and --validation-share would divide it again",
            "leave --validation-share out",
            folder=folder,
            splits=" and ".join(names),
        )
    parts = tuple(ClassFolder(folder=folder / name, label=label) for label, name in enumerate(names))
    return ImageSource(classes=tuple(names), parts={"train": parts})


def _trees(folder: Path, trees: Mapping[SplitName, Path]) -> ImageSource:
    classes = {split: _class_names(tree) for split, tree in trees.items()}
    differing = set(classes["train"]) ^ set(classes["val"])
    if differing:
        raise HpctrainError(
            "HT-source-class-in-one-split",
            "{folder}: {classes}: a class in only one of {trees}",
            "both need the same folders, one per class",
            folder=folder,
            classes=", ".join(sorted(differing)[:3]),
            trees=" and ".join(f"{tree.name}/" for tree in trees.values()),
        )
    return ImageSource(
        classes=tuple(classes["train"]),
        parts={
            split: tuple(ClassFolder(folder=trees[split] / name, label=label) for label, name in enumerate(names))
            for split, names in classes.items()
        },
        validation=trees["val"].name,
    )


def _webdataset(folder: Path, tars: Mapping[SplitName, Sequence[Path]]) -> ImageSource:
    """Shards of other programs; their classes are known once they are listed."""
    parts = {split: tuple(WebDatasetTar(archive=path) for path in tars.get(split, ())) for split in SPLITS}
    validation = split_of(tars["val"][0].relative_to(folder)) if "val" in tars else "val"
    return ImageSource(classes=(), parts=parts, validation=validation)


def _parquet(folder: Path, files: Mapping[SplitName, Sequence[Path]], columns: Columns) -> ImageSource:
    require("parquet")
    below = (path for tree in split_folders(folder).values() for path in tree.glob("*") if path.suffix != ".parquet")
    if tree := next((path for path in below if path.is_dir() and not path.name.startswith((".", "_"))), None):
        raise HpctrainError(
            "HT-source-archives-and-folders",
            "{folder} holds both {archive} and {tree}/",
            "move one of them elsewhere",
            folder=folder,
            archive=next(iter(files.values()))[0].relative_to(folder),
            tree=tree.relative_to(folder),
        )
    for split in SPLITS:
        if split not in files:
            raise HpctrainError(
                "HT-source-lacks-split",
                "{folder} has no Parquet file of {split}",
                "both train and val need some",
                folder=folder,
                split=split,
            )
    classes, groups = row_groups(folder, {split: files[split] for split in SPLITS}, columns)
    validation = split_of(files["val"][0].relative_to(folder))
    return ImageSource(classes=classes, parts=groups, columns=columns, validation=validation)


def _class_names(folder: Path, wanted: str = "") -> list[str]:
    if not folder.is_dir():
        raise HpctrainError("HT-source-lacks-folder", "there is no folder {folder}", _wanted(), folder=folder)
    entries = [path for path in folder.iterdir() if not is_clutter(path.name)]
    for path in entries:
        if not path.is_dir():
            raise HpctrainError(
                "HT-source-not-a-class",
                "{path} is not the folder of a class",
                "the images of a split lie in one folder per class: move them there",
                path=path,
            )
    if not entries:
        hint = wanted or _wanted()
        raise HpctrainError("HT-source-no-class", "{folder} has no folder of a class", hint, folder=folder)
    names = sorted(path.name for path in entries)
    spelt: dict[str, str] = {}
    for name in names:
        other = spelt.setdefault(unicodedata.normalize("NFC", name), name)
        if other != name:
            raise HpctrainError(
                "HT-source-class-twice",
                "{folder} has the folders {one!a} and {other!a}, which are one name in two forms of Unicode",
                "move the images of both into one: macOS and Linux spell accents differently",
                folder=folder,
                one=other,
                other=name,
            )
    return names


def _wanted() -> str:
    files = "with train-….parquet and val-….parquet, or with train-….tar and val-….tar"
    return f"name a folder with {', '.join(CHECKSUMS)}, with train/CLASS/ and val/CLASS/, {files}"

"""Which files and folders of a source are for training, and which for validation, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from hpctrain.common.shards.listing import wrong_source
from hpctrain.common.shards.manifest import SplitName

SPLITS: tuple[SplitName, ...] = ("train", "val")
# The names of the folder of the images that validate.
VALIDATION_FOLDERS = ("val", "valid", "validation")
# A word of a file's or folder's name says of which split it is.
_WORD = re.compile(r"(?:^|[^a-z])(train|val|test)")
# The number of a file among those of its split, as `datasets` names them: train-00000-of-00294.parquet.
_OF = re.compile(r"(?P<set>.*?)(?P<number>[0-9]{1,9})(?P<of>[-_]of[-_][0-9]{1,9})(?![0-9])")


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

"""Classes and validation labels in ImageNet's development kit (ILSVRC2012_devkit_t12, its readme.txt)."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.regular import read_regular
from hpctrain.common.shards.listing import DOWNLOAD_AGAIN, naming

META = "ILSVRC2012_devkit_t12/data/meta.mat"
GROUND_TRUTH = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"

# The limit for the kit in bytes; 2012's has 2.6 MB.
_MOST_BYTES = 1 << 24
_LONGEST_LABEL = 9


@dataclass(frozen=True, kw_only=True)
class Devkit:
    """Classes and labels.

    Attributes:
        samples: the number of training images of each class, by WordNet identifier in sorted order.
        labels: for each validation image, the index of its class in that order. The kit numbers classes from 1 in
            an order of its own.
    """

    samples: Mapping[str, int]
    labels: tuple[int, ...]


def read_devkit(path: Path) -> Devkit:
    """Read the kit's archive.

    Raises:
        HpctrainError: it is not there, is damaged, or holds no such files.
    """
    try:
        # All of it is unpacked first, which checks its checksum: readers of damaged tables read out of bounds.
        unpacked = gzip.decompress(read_regular(path, _MOST_BYTES))
        with naming(str(path)), tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as tar:
            meta, truth = (_content(tar, name, path) for name in (META, GROUND_TRUTH))
    except FileNotFoundError as error:
        raise HpctrainError(
            "HT-devkit-missing",
            "{path} is not there, and without it the labels of the validation images are unknown",
            "download it into the folder of the other archives",
            path=path,
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise HpctrainError(
            "HT-devkit-unreadable", "{path} cannot be read: {problem}", DOWNLOAD_AGAIN, path=path, problem=str(error)
        ) from error
    synsets = _synsets(meta, path)
    wnids = sorted(synset["WNID"] for synset in synsets)
    label_of = {synset["ILSVRC2012_ID"]: wnids.index(synset["WNID"]) for synset in synsets}
    return Devkit(
        samples={
            synset["WNID"]: synset["num_train_images"] for synset in sorted(synsets, key=lambda s: str(s["WNID"]))
        },
        labels=_labels(truth, label_of, path),
    )


def _content(tar: tarfile.TarFile, name: str, path: Path) -> bytes:
    try:
        file = tar.extractfile(name)
    except KeyError as error:
        raise HpctrainError(
            "HT-devkit-lacks-file", "{path} holds no {name}", DOWNLOAD_AGAIN, path=path, name=name
        ) from error
    if file is None:
        raise HpctrainError(
            "HT-devkit-not-a-file", "{path}: {name} is not a file", DOWNLOAD_AGAIN, path=path, name=name
        )
    return file.read()


def _synsets(meta: bytes, path: Path) -> list[dict[str, Any]]:
    """The synsets that are classes: those without children. The others are their hypernyms in WordNet."""
    from scipy.io import loadmat

    try:
        table = loadmat(io.BytesIO(meta))["synsets"].ravel()
        rows = [{name: row[name].item() for name in ("ILSVRC2012_ID", "WNID", "num_train_images")} for row in table]
        return [row for row, synset in zip(rows, table, strict=True) if synset["num_children"].item() == 0]
    except Exception as error:
        # The reader raises whatever its parsing stumbles over.
        raise HpctrainError(
            "HT-devkit-no-synsets",
            "{path}: {name} is not a table of synsets: {problem}",
            DOWNLOAD_AGAIN,
            path=path,
            name=META,
            problem=str(error),
        ) from error


def _labels(truth: bytes, label_of: Mapping[int, int], path: Path) -> tuple[int, ...]:
    labels = []
    for number, line in enumerate(truth.split(), 1):
        if len(line) > _LONGEST_LABEL or not line.isdigit() or int(line) not in label_of:
            label = line[:20].decode(errors="replace")
            raise HpctrainError(
                "HT-devkit-unknown-class",
                "{path}: {file}, line {line}: {label!r} is not a class of {meta}",
                DOWNLOAD_AGAIN,
                path=path,
                file=GROUND_TRUTH,
                line=number,
                label=label,
                meta=META,
            )
        labels.append(label_of[int(line)])
    return tuple(labels)

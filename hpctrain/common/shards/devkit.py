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

from hpctrain.common.files.regular import read_regular
from hpctrain.common.shards.listing import wrong_archive

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
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as tar:
            # Of a link or a folder there is no file, and no reader to call.
            meta, truth = (tar.extractfile(name).read() for name in (META, GROUND_TRUTH))  # type: ignore[union-attr]
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, KeyError, AttributeError) as error:
        raise wrong_archive(path, f"cannot be read: {error}") from error
    synsets = _synsets(meta, path)
    samples = {synset["WNID"]: synset["num_train_images"] for synset in synsets}
    label_of = {synset["ILSVRC2012_ID"]: label for label, synset in enumerate(synsets)}
    return Devkit(samples=samples, labels=_labels(truth, label_of, path))


def _synsets(meta: bytes, path: Path) -> list[dict[str, Any]]:
    """The synsets that are classes, by WordNet identifier: those without children. The others are their hypernyms."""
    from scipy.io import loadmat

    try:
        table = loadmat(io.BytesIO(meta))["synsets"].ravel()
        names = ("ILSVRC2012_ID", "WNID", "num_train_images")
        rows = [{name: row[name].item() for name in names} for row in table if row["num_children"].item() == 0]
        return sorted(rows, key=lambda row: str(row["WNID"]))
    except Exception as error:
        # The reader raises whatever its parsing stumbles over.
        raise wrong_archive(path, f"{META} is not a table of synsets: {error}") from error


def _labels(truth: bytes, label_of: Mapping[int, int], path: Path) -> tuple[int, ...]:
    labels = []
    for number, line in enumerate(truth.split(), 1):
        if len(line) > _LONGEST_LABEL or not line.isdigit() or int(line) not in label_of:
            label = line[:20].decode(errors="replace")
            raise wrong_archive(path, f"{GROUND_TRUTH}, line {number}: {label!r} is not a class of {META}")
        labels.append(label_of[int(line)])
    return tuple(labels)

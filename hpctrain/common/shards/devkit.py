"""Classes and validation labels in ImageNet's development kit (ILSVRC2012_devkit_t12, its readme.txt)."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hpctrain.common.files.regular import read_regular
from hpctrain.common.shards.listing import wrong_archive

META = "ILSVRC2012_devkit_t12/data/meta.mat"
GROUND_TRUTH = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"

# The limit for the kit in bytes; 2012's has 2.6 MB.
_MOST_BYTES = 1 << 24
_LONGEST_LABEL = 9


class Devkit(NamedTuple):
    """Classes and labels.

    Attributes:
        classes: their WordNet identifiers, sorted.
        labels: for each validation image, the index of its class. The kit numbers classes from 1 in an order of its
            own.
    """

    classes: tuple[str, ...]
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
    numbers = _classes(meta, path)
    label_of = {number: label for label, number in enumerate(numbers.values())}
    return Devkit(classes=tuple(numbers), labels=_labels(truth, label_of, path))


def _classes(meta: bytes, path: Path) -> dict[str, int]:
    """The numbers of the classes by WordNet identifier, sorted: the synsets without children, of which the others are
    hypernyms.
    """
    from scipy.io import loadmat

    try:
        table = loadmat(io.BytesIO(meta))["synsets"].ravel()
        rows = [row for row in table if row["num_children"].item() == 0]
        return dict(sorted((str(row["WNID"].item()), row["ILSVRC2012_ID"].item()) for row in rows))
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

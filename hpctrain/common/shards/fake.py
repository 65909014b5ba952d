"""Makes a small set with the structure and the irregularities of ImageNet's original archives."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.whole import put_in_place, temporary, write_whole
from hpctrain.common.shards.archives import DEVKIT, TRAIN, VALIDATION
from hpctrain.common.shards.devkit import GROUND_TRUTH, META
from hpctrain.common.shards.synthetic_images import FakeImage, Kind, encode, photographs

_VALIDATION_SHARE = 10
_GREY_SHARE = 50
# In the training split; the real set has one PNG and 22 CMYK images among 1.28 million.
_CMYK, _PNG = 3, 1
_CHUNK = 32


@dataclass(frozen=True, kw_only=True)
class FakeSet:
    """What to make: images of both splits together, of which one in ten is for validation; ``broken`` training images
    that cannot be decoded; ``size`` of most images' longer side in pixels.
    """

    images: int
    classes: int
    seed: int
    size: int
    broken: int

    def __post_init__(self) -> None:
        if self.classes < 1 or self.validation < self.classes:
            least = self.classes * _VALIDATION_SHARE
            raise HpctrainError(
                "HT-images-too-few",
                "{images} images are too few for {classes} classes",
                f"--images must be at least {least}",
                images=self.images,
                classes=self.classes,
            )
        if not 0 <= self.broken <= self.train // 2:
            raise HpctrainError(
                "HT-images-too-many-broken",
                "--broken {broken} of {train} training images",
                f"at most {self.train // 2}, half of them",
                broken=self.broken,
                train=self.train,
            )

    @property
    def validation(self) -> int:
        return self.images // _VALIDATION_SHARE

    @property
    def train(self) -> int:
        return self.images - self.validation

    @property
    def wnids(self) -> list[str]:
        """Sorted identifiers in the form of WordNet's."""
        return [f"n{9_000_000 + 17 * label:08}" for label in range(self.classes)]


def make_fake(folder: Path, fake: FakeSet) -> None:
    """Write the three archives; their bytes depend on ``fake`` alone.

    Raises:
        HpctrainError: the folder holds one of them already, the disk is full, or a process was killed.
    """
    for name in (TRAIN, VALIDATION, DEVKIT):
        if (folder / name).exists():
            raise HpctrainError(
                "HT-folder-exists",
                "{folder} is there already",
                "choose another folder, or remove it",
                folder=folder / name,
            )
    # Before the processes fork, so that they share them.
    photographs()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            _write_archive(folder / TRAIN, _class_tars(fake, pool))
            _write_archive(folder / VALIDATION, _validation(fake, pool))
    except OSError as error:
        raise disk_error(error, folder, "choose another folder") from error
    except BrokenProcessPool as error:
        raise HpctrainError(
            "HT-process-killed",
            "a process that makes images was killed",
            "usually memory ran out: --size PIXELS makes smaller ones",
            exit_code=1,
        ) from error
    write_whole(folder / DEVKIT, _devkit(fake))


def train_labels(fake: FakeSet) -> list[int]:
    """The label of each training image, in class order; class sizes differ by at most one."""
    return sorted(number % fake.classes for number in range(fake.train))


def validation_labels(fake: FakeSet) -> list[int]:
    """The label of each validation image, in random order."""
    labels = np.arange(fake.validation) % fake.classes
    return [int(label) for label in np.random.default_rng((fake.seed, 2)).permutation(labels)]


def kinds(fake: FakeSet) -> list[Kind]:
    """The irregularity of each training image."""
    odd: dict[Kind, int] = {
        "cut short": -(-fake.broken // 2),
        "overwritten": fake.broken // 2,
        "cmyk": _CMYK,
        "png": _PNG,
        "grey": fake.train // _GREY_SHARE,
    }
    found = [kind for kind, count in odd.items() for _ in range(count)]
    found += ["colour"] * (fake.train - len(found))
    order = np.random.default_rng((fake.seed, 3)).permutation(fake.train)
    return [found[index] for index in order]


def _images(fake: FakeSet, split: int, labels: Sequence[int], kinds: Iterable[Kind]) -> list[FakeImage]:
    return [
        FakeImage(entropy=(fake.seed, split, number), label=label, classes=fake.classes, size=fake.size, kind=kind)
        for number, (label, kind) in enumerate(zip(labels, kinds, strict=True))
    ]


def _class_tars(fake: FakeSet, pool: ProcessPoolExecutor) -> Iterator[tuple[str, bytes]]:
    """Name and content of each class's tar."""
    images = _images(fake, 0, train_labels(fake), kinds(fake))
    contents = zip(images, pool.map(encode, images, chunksize=_CHUNK), strict=True)
    for label, group in groupby(contents, key=lambda pair: pair[0].label):
        wnid = fake.wnids[label]
        # Numbers with gaps and without zeros in front, as WordNet's images have them.
        names = ((f"{wnid}_{3 * number + 1}.JPEG", content) for number, (_, content) in enumerate(group))
        yield f"{wnid}.tar", _tar(names)


def _validation(fake: FakeSet, pool: ProcessPoolExecutor) -> Iterator[tuple[str, bytes]]:
    labels = validation_labels(fake)
    grey: list[Kind] = ["grey" if number % _GREY_SHARE == 1 else "colour" for number in range(fake.validation)]
    images = _images(fake, 1, labels, grey)
    for number, content in enumerate(pool.map(encode, images, chunksize=_CHUNK), 1):
        yield f"ILSVRC2012_val_{number:08}.JPEG", content


def _devkit(fake: FakeSet) -> bytes:
    ids = _ids(fake)
    truth = "".join(f"{ids[label]}\n" for label in validation_labels(fake))
    content = _tar([(META, _meta(fake, ids)), (GROUND_TRUTH, truth.encode())])
    return gzip.compress(content, mtime=0)


def _ids(fake: FakeSet) -> list[int]:
    """The kit's own number of each class, from 1, in another order than the sorted one."""
    return [int(number) + 1 for number in np.random.default_rng((fake.seed, 4)).permutation(fake.classes)]


def _meta(fake: FakeSet, ids: Sequence[int]) -> bytes:
    """The table of synsets: classes by their numbers, and after them one that has classes below it."""
    from scipy.io import savemat

    counts = np.bincount(train_labels(fake), minlength=fake.classes)
    fields = (
        "ILSVRC2012_ID",
        "WNID",
        "words",
        "gloss",
        "num_children",
        "children",
        "wordnet_height",
        "num_train_images",
    )
    rows = [
        (ids[label], wnid, f"fake {label}", "an image that was generated", 0, np.zeros((1, 0)), 0, int(counts[label]))
        for label, wnid in enumerate(fake.wnids)
    ]
    rows.sort()
    rows.append((fake.classes + 1, "n00001740", "entity", "all", fake.classes, np.array([sorted(ids)]), 1, 0))
    table = np.array(rows, [(name, object) for name in fields])[:, None]
    buffer = io.BytesIO()
    savemat(buffer, {"synsets": table})
    # The format begins with a text of 116 bytes, in which scipy notes the time.
    return b"MATLAB 5.0 MAT-file".ljust(116) + buffer.getvalue()[116:]


def _write_archive(path: Path, files: Iterator[tuple[str, bytes]]) -> None:
    fresh = temporary(path)
    try:
        with fresh.open("xb") as file, tarfile.open(fileobj=file, mode="w") as tar:
            for name, content in files:
                _add(tar, name, content)
        put_in_place(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def _tar(files: Iterable[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files:
            _add(tar, name, content)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    info.mode = 0o644
    tar.addfile(info, io.BytesIO(content))

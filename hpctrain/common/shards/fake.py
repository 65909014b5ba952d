"""Makes a small set with the structure and irregularities of ImageNet's original archives, of drawn images."""

from __future__ import annotations

import colorsys
import gzip
import io
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.whole import put_in_place, temporary, write_whole
from hpctrain.common.shards.devkit import GROUND_TRUTH, META
from hpctrain.common.shards.image_sources import DEVKIT, TRAIN, VALIDATION

if TYPE_CHECKING:
    from PIL import Image


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
        problem = ""
        if self.classes < 1 or self.validation < self.classes:
            problem = f"{self.images} images are too few for {self.classes} classes: ten of each at least"
        elif not 0 <= self.broken <= self.train // 2:
            problem = f"--broken {self.broken} of {self.train} training images: at most half of them"
        if problem:
            raise HpctrainError("HT-fake-wrong", "{problem}", problem=problem)

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
    if there := [folder / name for name in (TRAIN, VALIDATION, DEVKIT) if (folder / name).exists()]:
        raise HpctrainError("HT-fake-wrong", "{path} is there already", "choose another folder", path=there[0])
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
    drawn = [kind for kind, count in odd.items() for _ in range(count)]
    drawn += ["colour"] * (fake.train - len(drawn))
    order = np.random.default_rng((fake.seed, 3)).permutation(fake.train)
    return [drawn[index] for index in order]


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
    fields = [
        *("ILSVRC2012_ID", "WNID", "words", "gloss"),
        *("num_children", "children", "wordnet_height", "num_train_images"),
    ]
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


def _write_archive(path: Path, files: Iterable[tuple[str, bytes]]) -> None:
    fresh = temporary(path)
    try:
        with fresh.open("xb") as file:
            _pack(file, files)
        put_in_place(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def _tar(files: Iterable[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    _pack(buffer, files)
    return buffer.getvalue()


def _pack(file: IO[bytes], files: Iterable[tuple[str, bytes]]) -> None:
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


Kind = Literal["colour", "grey", "cmyk", "png", "cut short", "overwritten"]

_PHOTOGRAPHS = ("china.jpg", "flower.jpg")
_TINT = 0.45
_GRATING = 45.0
_MIDDLE = 115


@dataclass(frozen=True, kw_only=True)
class FakeImage:
    """What makes one image: ``entropy`` is its own part, ``label`` of ``classes`` its hue and the direction of its
    stripes, ``size`` the longer side in pixels that most images of the set have.
    """

    entropy: tuple[int, ...]
    label: int
    classes: int
    size: int
    kind: Kind


def encode(image: FakeImage) -> bytes:
    """Encode the image as the set would have it in a file named JPEG."""
    import simplejpeg
    from PIL import Image

    rng = np.random.default_rng(image.entropy)
    pixels = _draw(image, rng)
    if odd := {"grey": ("L", "JPEG"), "cmyk": ("CMYK", "JPEG"), "png": ("RGB", "PNG")}.get(image.kind):
        buffer = io.BytesIO()
        Image.fromarray(pixels).convert(odd[0]).save(buffer, odd[1])
        return buffer.getvalue()
    quality = int(rng.integers(75, 96)) if image.kind == "colour" else 90
    content = bytes(simplejpeg.encode_jpeg(pixels, quality=quality, colorspace="RGB", colorsubsampling="420"))
    if image.kind == "cut short":
        return content[: int(len(content) * rng.uniform(0.2, 0.8))]
    return rng.bytes(len(content)) if image.kind == "overwritten" else content


def _draw(image: FakeImage, rng: np.random.Generator) -> NDArray[np.uint8]:
    """uint8, shape (height, width, 3)."""
    from PIL import Image, ImageChops

    width, height = _shape(image.size, rng)
    base = _crop(rng, width, height) if rng.random() < 0.7 else _clouds(rng, width, height)
    red, green, blue = colorsys.hsv_to_rgb(image.label / image.classes, 0.8, 0.9)
    colour = Image.new("RGB", base.size, (round(255 * red), round(255 * green), round(255 * blue)))
    angle = np.pi * (image.label + rng.uniform(-0.2, 0.2)) / image.classes
    over = Image.fromarray(_stripes(angle, rng, width, height) + rng.integers(0, 25, (height, width), np.uint8))
    tinted = Image.blend(base, colour, _TINT)
    return np.asarray(ImageChops.add(tinted, Image.merge("RGB", (over, over, over)), offset=-_MIDDLE))


def _shape(size: int, rng: np.random.Generator) -> tuple[int, int]:
    longer = max(8, round(size * rng.choice([1.0, 1.0, 1.0, rng.uniform(0.5, 1.3)])))
    shorter = max(8, round(longer * rng.choice([0.75, 2 / 3, rng.uniform(0.5, 1.0)])))
    return (longer, shorter) if rng.random() < 0.75 else (shorter, longer)


def _crop(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    from PIL import Image

    photograph = Image.fromarray(photographs()[int(rng.integers(len(_PHOTOGRAPHS)))])
    part = rng.uniform(0.4, 1.0)
    wide, high = int(photograph.width * part), int(photograph.height * part)
    left = int(rng.integers(photograph.width - wide + 1))
    top = int(rng.integers(photograph.height - high + 1))
    crop = photograph.resize((width, height), Image.Resampling.BILINEAR, (left, top, left + wide, top + high))
    return crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else crop


def _clouds(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    from PIL import Image

    seeds = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8))
    return seeds.resize((width, height), Image.Resampling.BICUBIC)


def _stripes(angle: float, rng: np.random.Generator, width: int, height: int) -> NDArray[np.uint8]:
    """Brightness around :data:`_MIDDLE`."""
    waves = rng.uniform(5, 9) * 2 * np.pi / max(width, height)
    across = np.arange(width, dtype=np.float32) * np.float32(waves * np.cos(angle))
    down = np.arange(height, dtype=np.float32) * np.float32(waves * np.sin(angle)) + np.float32(rng.uniform(0, 6))
    return (_MIDDLE + np.float32(_GRATING) * np.sin(across[None, :] + down[:, None])).astype(np.uint8)


@cache
def photographs() -> tuple[NDArray[np.uint8], ...]:
    """The two photographs of scikit-learn, 640 x 427: china.jpg by Yann Forget, flower.jpg by dany13 (both CC BY)."""
    from sklearn.datasets import load_sample_image

    return tuple(load_sample_image(name) for name in _PHOTOGRAPHS)

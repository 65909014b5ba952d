"""Makes a small set with the irregularities of ImageNet's images: drawn photographs in folders of classes."""

from __future__ import annotations

import colorsys
import io
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error, require_empty

if TYPE_CHECKING:
    from PIL import Image

Kind = Literal["colour", "grey", "cmyk", "png", "cut short", "overwritten"]

_VALIDATION_SHARE = 10
_GREY_SHARE = 50
# In the training split; the real set has one PNG and 22 CMYK images among 1.28 million.
_CMYK, _PNG = 3, 1
_CHUNK = 32
_PHOTOGRAPHS = ("china.jpg", "flower.jpg")
_TINT = 0.45
_GRATING = 45.0
_MIDDLE = 115


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


@dataclass(frozen=True, kw_only=True)
class FakeImage:
    """One image of a set. ``number`` counts the images of its split (0 for training, 1 for validation), and decides its
    class, whose hue and direction of stripes it has, and its random part.
    """

    folder: Path
    fake: FakeSet
    split: int
    number: int
    kind: Kind

    @property
    def label(self) -> int:
        return self.number % self.fake.classes

    @property
    def path(self) -> Path:
        """Its file, named as ImageNet's are: by the identifier of its class in the form of WordNet's."""
        wnid = f"n{9_000_000 + 17 * self.label:08}"
        if self.split:
            return self.folder / "val" / wnid / f"ILSVRC2012_val_{self.number + 1:08}.JPEG"
        # Numbers with gaps and without zeros in front.
        return self.folder / "train" / wnid / f"{wnid}_{3 * (self.number // self.fake.classes) + 1}.JPEG"


def make_fake(folder: Path, fake: FakeSet) -> None:
    """Write the images into ``train/CLASS/`` and ``val/CLASS/``; their bytes depend on ``fake`` alone.

    Raises:
        HpctrainError: the folder holds files already, or the disk is full.
    """
    # Before the processes fork, so that they share them.
    photographs()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_empty(folder)
        images = [*_images(folder, fake)]
        for parent in {image.path.parent for image in images}:
            parent.mkdir(parents=True)
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(_write, images, chunksize=_CHUNK))
    except OSError as error:
        raise disk_error(error, folder, "choose another folder") from error
    except BrokenProcessPool as error:
        raise HpctrainError(
            "HT-process-killed",
            "a process that makes images was killed",
            "usually memory ran out: --size PIXELS makes smaller ones",
            exit_code=1,
        ) from error


def _images(folder: Path, fake: FakeSet) -> Iterator[FakeImage]:
    odd: dict[Kind, int] = {
        "cut short": -(-fake.broken // 2),
        "overwritten": fake.broken // 2,
        "cmyk": _CMYK,
        "png": _PNG,
        "grey": fake.train // _GREY_SHARE,
    }
    kinds: list[Kind] = [kind for kind, count in odd.items() for _ in range(count)]
    kinds += ["colour"] * (fake.train - len(kinds))
    order = np.random.default_rng((fake.seed, 3)).permutation(fake.train)
    trained = [kinds[index] for index in order]
    validated: list[Kind] = ["grey" if number % _GREY_SHARE == 1 else "colour" for number in range(fake.validation)]
    for split, drawn in enumerate((trained, validated)):
        for number, kind in enumerate(drawn):
            yield FakeImage(folder=folder, fake=fake, split=split, number=number, kind=kind)


def _write(image: FakeImage) -> None:
    image.path.write_bytes(encode(image))


def encode(image: FakeImage) -> bytes:
    """Encode the image as ImageNet would have it in a file named JPEG."""
    import simplejpeg
    from PIL import Image

    rng = np.random.default_rng((image.fake.seed, image.split, image.number))
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

    classes = image.fake.classes
    width, height = _shape(image.fake.size, rng)
    base = _crop(rng, width, height) if rng.random() < 0.7 else _clouds(rng, width, height)
    red, green, blue = colorsys.hsv_to_rgb(image.label / classes, 0.8, 0.9)
    colour = Image.new("RGB", base.size, (round(255 * red), round(255 * green), round(255 * blue)))
    angle = np.pi * (image.label + rng.uniform(-0.2, 0.2)) / classes
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

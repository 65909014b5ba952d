"""Generates images that are similar enough to photographs to be decoded, augmented and classified."""

from __future__ import annotations

import colorsys
import io
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image

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
    rng = np.random.default_rng(image.entropy)
    pixels = _draw(image, rng)
    if image.kind == "colour":
        return _jpeg(pixels, int(rng.integers(75, 96)))
    if image.kind == "cut short":
        whole = _jpeg(pixels, 90)
        return whole[: int(len(whole) * rng.uniform(0.2, 0.8))]
    if image.kind == "overwritten":
        return rng.bytes(len(_jpeg(pixels, 90)))
    return _odd(pixels, image.kind)


def _jpeg(pixels: NDArray[np.uint8], quality: int) -> bytes:
    import simplejpeg

    return bytes(simplejpeg.encode_jpeg(pixels, quality=quality, colorspace="RGB", colorsubsampling="420"))


def _odd(pixels: NDArray[np.uint8], kind: Kind) -> bytes:
    from PIL import Image

    mode, kept_as = {"grey": ("L", "JPEG"), "cmyk": ("CMYK", "JPEG"), "png": ("RGB", "PNG")}[kind]
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kept_as)
    return buffer.getvalue()


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

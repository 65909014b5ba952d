"""One photograph, from the bytes of its file to the network's input.

Everything random comes from the generator that is passed, so equal generators give equal pixels in any process.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cv2
import numpy as np

from hpctrain.common.recipes.sections import Images
from hpctrain.common.shards.decoding import BrokenImageError, Header, Pixels, decode_rows
from hpctrain.worker.data.augment import augment, erase

_TRIES = 10
# The scales in eighths for which libjpeg-turbo has fast code; others take longer than decoding the whole photograph.
_SCALES = (1, 2, 4, 8)
# If an image shrinks more, the taps of bilinear interpolation after a small blur lie too far apart.
_MOST_INTERPOLATED = 2.7
# If an image shrinks less, a blur is not worth its time.
_LEAST_BLURRED = 1.2
# Longer side over shorter: validation does not resize what lies beyond, which could take any amount of memory.
_MOST_ELONGATED = 3

# Each process works on one image at a time, since there is one process for each core.
cv2.setNumThreads(1)


class Crop(NamedTuple):
    """A rectangle of a photograph, in pixels."""

    left: int
    top: int
    width: int
    height: int


def size_at(images: Images, epoch: int) -> int:
    """The side of training images in pixels in an epoch, counted from 0."""
    if not images.size_ramp:
        return images.size
    epochs, sizes = zip(*images.size_ramp, strict=True)
    return max(32, 32 * round(float(np.interp(epoch, epochs, sizes)) / 32))


def training_crop(header: Header, images: Images, random: np.random.Generator) -> tuple[Crop, bool]:
    """A random part of a photograph, and whether it is to be mirrored."""
    crop = random_crop(header.width, header.height, images, random)
    return crop, images.flip and random.random() < 0.5


def changed(
    part: Pixels, size: int, images: Images, random: np.random.Generator, *, flip: bool, out: Pixels | None = None
) -> Pixels:
    """A part of a photograph as an image of shape (size, size, 3), changed at random.

    Args:
        out: where the image is to be, if that is to save a copy; what is returned may still be elsewhere.
    """
    image = resize(part, size, size, out)
    if flip:
        image = cv2.flip(image, 1, dst=image)
    if images.augmentation:
        image = augment(image, images.augmentation, random)
    return erase(image, images.erasing, mean_colour(images), random) if images.erasing else image


def mean_colour(images: Images) -> Pixels:
    """The colour that is closest to 0 when normalised, of shape (3,)."""
    colour: Pixels = np.rint(255 * np.array(images.mean, np.float32)).astype(np.uint8)
    return colour


def validation_crop(header: Header, images: Images) -> tuple[Crop, int, int]:
    """A photograph, of an elongated one the middle; and the width and height to resize it to."""
    crop = _middle(header.width, header.height)
    factor = images.test_resize / min(header.width, header.height)
    return crop, round(crop.width * factor), round(crop.height * factor)


def middle(part: Pixels, wide: int, high: int, size: int) -> Pixels:
    """The middle, of shape (size, size, 3), of what is resized to a width and a height."""
    left, top = (wide - size) // 2, (high - size) // 2
    return resize(part, wide, high)[top : top + size, left : left + size]


def _middle(width: int, height: int) -> Crop:
    """The whole photograph; of an elongated one the middle, with a wide margin around what is shown."""
    most = _MOST_ELONGATED * min(width, height)
    wide, tall = min(width, most), min(height, most)
    return Crop(left=(width - wide) // 2, top=(height - tall) // 2, width=wide, height=tall)


def random_crop(width: int, height: int, images: Images, random: np.random.Generator) -> Crop:
    """A random rectangle whose area and (logarithmic) aspect ratio are uniform within the recipe's bounds.

    After ten tries that do not fit: the largest part in the middle whose ratio is within the bounds (Szegedy et al.
    2015, section 6; the rules for what does not fit are torchvision's).
    """
    least, most = images.crop_area
    low, high = images.crop_ratio
    lowest, highest = math.log(low), math.log(high)
    for _ in range(_TRIES):
        # What Generator.uniform computes, in a third of its time.
        area = width * height * (least + (most - least) * random.random())
        ratio = math.exp(lowest + (highest - lowest) * random.random())
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            left, top = int(random.integers(width - wide + 1)), int(random.integers(height - tall + 1))
            return Crop(left=left, top=top, width=wide, height=tall)
    ratio = min(max(width / height, low), high)
    wide, tall = min(width, max(1, round(height * ratio))), min(height, max(1, round(width / ratio)))
    return Crop(left=(width - wide) // 2, top=(height - tall) // 2, width=wide, height=tall)


def resize(pixels: Pixels, width: int, height: int, out: Pixels | None = None) -> Pixels:
    """Resize an image with bilinear interpolation, antialiased where it shrinks, into ``out`` if that is given.

    Pillow's filter is a triangle as wide as two pixels of the result, of variance r^2 / 6 where the image shrinks by r.
    Interpolation alone has 1 / 6; a blur of three pixels before it adds the rest, in a sixth of Pillow's time.

    Raises:
        BrokenImageError: OpenCV refuses its shape.
    """
    try:
        return _resize(pixels, width, height, out)
    except cv2.error as error:
        raise BrokenImageError(f"{pixels.shape[1]} x {pixels.shape[0]} pixels: {error}") from error


def _resize(pixels: Pixels, width: int, height: int, out: Pixels | None) -> Pixels:
    shrinks = pixels.shape[1] / width, pixels.shape[0] / height
    filtered, interpolation = pixels, cv2.INTER_LINEAR
    if max(shrinks) > _MOST_INTERPOLATED:
        interpolation = cv2.INTER_AREA
    elif max(shrinks) > _LEAST_BLURRED:
        x, y = (_deviation((r * r - 1) / 6) for r in shrinks)
        filtered = cv2.GaussianBlur(pixels, (3, 3), x, sigmaY=y, borderType=cv2.BORDER_REPLICATE)
    resized: Pixels = cv2.resize(filtered, (width, height), dst=out, interpolation=interpolation)
    return resized


def _deviation(variance: float) -> float:
    """The standard deviation of a Gaussian whose three middle samples have a variance, as far as three can."""
    outer = min(max(variance / 2, 1e-4), 0.3)
    return math.sqrt(-0.5 / math.log(outer / (1 - 2 * outer)))


def decoded(content: bytes, header: Header, crop: Crop, width: int, height: int, *, exact: bool = False) -> Pixels:
    """A part of a photograph, which is to be resized to ``width`` x ``height``.

    Args:
        exact: at full size, with interpolated colours; by default at the smallest scale at which it has enough pixels,
            with colours as they are stored, if there is one.

    Raises:
        BrokenImageError: it cannot be decoded.
    """
    pixels = header.pixels
    if pixels is None:
        for eighths in () if exact else _SCALES:
            if crop.width * eighths >= 8 * width and crop.height * eighths >= 8 * height:
                break
        else:
            eighths, exact = 8, True
        pixels = decode_rows(content, header, crop.top + crop.height, eighths, exact=exact)
        if eighths < 8 and pixels.shape[:2] != (header.height, header.width):
            crop = _scaled(crop, eighths)
    return pixels[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]


def _scaled(crop: Crop, eighths: int) -> Crop:
    left, right, top, bottom = (
        round(edge * eighths / 8) for edge in (crop.left, crop.left + crop.width, crop.top, crop.top + crop.height)
    )
    return Crop(left=left, top=top, width=right - left, height=bottom - top)

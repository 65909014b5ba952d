"""Decodes photographs with libjpeg-turbo, or with Pillow, which supports more formats."""

from __future__ import annotations

import io

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

# Of shape (height, width, 3): red, green, blue.
Pixels = NDArray[np.uint8]

# Of one photograph; a header that was overwritten may ask for any. Pillow refuses more too.
_MOST_PIXELS = 178_956_970


class BrokenImageError(Exception):
    """An image that no decoder can read, with the decoder's message."""


def look(content: bytes) -> tuple[int, int, Pixels | None]:
    """Width and height; also the pixels if it is not an ordinary JPEG file.

    Raises:
        BrokenImageError: no decoder knows it, or it has too many pixels.
    """
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
    except ValueError:
        colours = None
    if colours not in ("RGB", "YCbCr", "Gray"):
        pixels = decode_by_pillow(content)
        return pixels.shape[1], pixels.shape[0], pixels
    if width * height > _MOST_PIXELS:
        raise BrokenImageError(f"{width} x {height} pixels, where {_MOST_PIXELS} are the most")
    return width, height, None


def decode(content: bytes, least_width: int, least_height: int) -> Pixels:
    """Decode an ordinary JPEG file, whole or at the smallest scale with at least this many pixels.

    What is cut short is broken, although much of it could be shown.

    Raises:
        BrokenImageError: it is damaged.
    """
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(content, "RGB", min_width=least_width, min_height=least_height)
    except ValueError:
        # simplejpeg takes bytes between two segments for damage, which other decoders skip
        return decode_by_pillow(content)
    return pixels


def decode_by_pillow(content: bytes) -> Pixels:
    """Decode a whole photograph of any format.

    Raises:
        BrokenImageError: Pillow does not know it, or it is damaged.
    """
    try:
        with Image.open(io.BytesIO(content)) as photograph:
            if photograph.mode.startswith("I;16"):
                # Pillow would clip 16 bits instead of scaling them
                grey = (np.asarray(photograph) >> 8).astype(np.uint8)
                return np.repeat(grey[:, :, None], 3, axis=2)
            return np.asarray(photograph.convert("RGB"))
    except MemoryError:
        raise
    except UnidentifiedImageError as error:
        # Its own words have the address of an object.
        raise BrokenImageError("not an image that Pillow knows") from error
    except Exception as error:
        # Pillow's plug-ins raise whatever their parsing stumbles over
        raise BrokenImageError(str(error) or type(error).__name__) from error


def fault(content: bytes) -> str | None:
    """Why an image cannot be decoded; None if it can."""
    try:
        width, height, pixels = look(content)
        if pixels is None:
            decode(content, width, height)
    except BrokenImageError as error:
        return str(error)
    return None

"""Decodes photographs with libjpeg-turbo, or with Pillow, which supports more formats.

The formats and the pixels of a photograph are bounded, by its header. docs/shards.md states the limits.
"""

from __future__ import annotations

import io
import re
from typing import NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

# Shape (height, width, 3): red, green, blue.
Pixels = NDArray[np.uint8]

# The largest file of a photograph, in bytes.
MOST_BYTES = 1 << 26
# Decoders take 3 bytes a pixel of a JPEG file in one scan, and 7 to 22 where they hold a photograph as a whole.
_MOST_PIXELS = 1 << 27
# Pillow tries these formats alone: of others, some start programs (Ghostscript for EPS).
_FORMATS = ("JPEG", "PNG", "WEBP")
# The most rows of a block of a JPEG file whose components are halved at most.
_BLOCK_ROWS = 16
END = b"\xff\xd9"
# The first thing that libjpeg-turbo notices in a whole file whose header has fewer rows than it: what is left over.
_LEFT_OVER = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker 0xd[0-9]")
# How many pixels are converted at a time.
_STRIP_PIXELS = 1 << 22


class BrokenImageError(Exception):
    """An image that no decoder can read, with the decoder's message."""


class Header(NamedTuple):
    """Width and height of a photograph; ``pixels`` only if it is not an ordinary JPEG file."""

    width: int
    height: int
    pixels: Pixels | None = None


def look(content: bytes) -> Header:
    """Read the header of a photograph.

    Raises:
        BrokenImageError: no decoder knows it, or it is beyond a limit.
    """
    if len(content) > MOST_BYTES:
        raise BrokenImageError(f"{len(content)} bytes, where {MOST_BYTES} are the most")
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
    except ValueError:
        colours = None
    if colours not in ("RGB", "YCbCr", "Gray"):
        pixels = decode_by_pillow(content)
        return Header(width=pixels.shape[1], height=pixels.shape[0], pixels=pixels)
    _require_pixels(width, height)
    return Header(width=width, height=height)


def _require_pixels(width: int, height: int) -> None:
    if width * height > _MOST_PIXELS:
        raise BrokenImageError(f"{width} x {height} pixels, where {_MOST_PIXELS} are the most")


def _height_place(content: bytes) -> int | None:
    """Where the height is in a JPEG file whose rows are stored from top to bottom, in one scan.

    Follows its segments, so that a thumbnail in one is passed over.
    """
    frame = components = 0
    place = 2
    while content[place : place + 1] == b"\xff":
        marker, place = content[place + 1 : place + 2], place + 2
        if marker in (b"\xc0", b"\xc1"):
            frame, components = place, int.from_bytes(content[place + 7 : place + 8])
        elif marker == b"\xda":
            # Whether this scan has all components, so that it is the only one.
            return frame + 3 if frame and content[place + 2 : place + 3] == bytes([components]) else None
        place += max(2, int.from_bytes(content[place : place + 2]))
    return None


def decode(content: bytes, least_width: int, least_height: int, *, exact: bool = True) -> Pixels:
    """Decode an ordinary JPEG file, whole or at the smallest scale with at least this many pixels.

    What is cut short is broken, although much of it could be shown. Colours that are stored at half the resolution are
    interpolated, or, if it need not be exact, repeated.

    Raises:
        BrokenImageError: it is damaged.
    """
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(
            content, "RGB", fastupsample=not exact, min_width=least_width, min_height=least_height
        )
    except ValueError:
        # simplejpeg takes bytes between two segments for damage, which other decoders skip
        return decode_by_pillow(content)
    return pixels


def decode_rows(content: bytes, header: Header, bottom: int, eighths: int, *, exact: bool = True) -> Pixels:
    """Decode an ordinary JPEG file at so many eighths of its size, and of its rows those above ``bottom``, counted at
    full size, with a few more. The others are at most a part of what is returned; a damage there may stay unnoticed.

    The header is given fewer rows, at which the decoder stops. ``exact`` is of :func:`decode`.

    Raises:
        BrokenImageError: it is damaged.
    """
    # Colours of a row may be interpolated with those of the next that is decoded, at most 8 rows away.
    rows = -(-(bottom + 8 // eighths) // _BLOCK_ROWS) * _BLOCK_ROWS
    width = -(-header.width * eighths // 8)
    # A file that is cut short lacks its end, and is decoded whole, so that it is broken wherever it is cut.
    place = _height_place(content) if rows < header.height and content.endswith(END) else None
    if place is None:
        return decode(content, width, -(-header.height * eighths // 8), exact=exact)
    pixels: Pixels = np.empty((rows * eighths // 8, width, 3), np.uint8)
    shortened = b"".join((content[:place], rows.to_bytes(2), memoryview(content)[place + 2 :]))
    try:
        simplejpeg.decode_jpeg(
            shortened, "RGB", fastupsample=not exact, min_width=width, min_height=len(pixels), buffer=pixels
        )
    except ValueError as error:
        if not _LEFT_OVER.fullmatch(str(error)):
            return decode(content, width, -(-header.height * eighths // 8), exact=exact)
    return pixels


def decode_by_pillow(content: bytes) -> Pixels:
    """Decode a whole photograph: JPEG, PNG or WebP, whatever its name.

    Raises:
        BrokenImageError: it is of another format, beyond a limit, or damaged.
    """
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as photograph:
            # Until here only its header was read.
            _require_pixels(*photograph.size)
            if photograph.mode.startswith("I;16"):
                # Pillow would clip 16 bits instead of scaling them
                grey = (np.asarray(photograph) >> 8).astype(np.uint8)
                return np.repeat(grey[:, :, None], 3, axis=2)
            photograph.load()
            return _rgb(photograph)
    except (MemoryError, BrokenImageError):
        raise
    except UnidentifiedImageError as error:
        # Pillow's own message contains the address of an object.
        raise BrokenImageError("neither JPEG nor PNG nor WebP") from error
    except Exception as error:
        # Pillow's plug-ins raise whatever their parsing stumbles over
        raise BrokenImageError(str(error) or type(error).__name__) from error


def _rgb(photograph: Image.Image) -> Pixels:
    """The pixels in strips, since converting all at once would hold the photograph four times."""
    width, height = photograph.size
    rows = max(1, _STRIP_PIXELS // width)
    if rows >= height:
        return np.asarray(photograph.convert("RGB"))
    pixels = np.empty((height, width, 3), np.uint8)
    for top in range(0, height, rows):
        strip = photograph.crop((0, top, width, min(top + rows, height)))
        pixels[top : top + rows] = np.asarray(strip.convert("RGB"))
    return pixels


def shrunk(content: bytes, short_side: int, quality: int) -> bytes:
    """A photograph as a new JPEG file in colour, without metadata, whose shorter side has at most so many pixels.

    An ordinary JPEG file of such a size stays as it is if the new one would have more bytes. The same bytes on each
    machine: Pillow resizes in whole numbers, by Lanczos' filter, and decoder and encoder compute exactly.

    Raises:
        BrokenImageError: it cannot be decoded.
    """
    header = look(content)
    pixels, least = header.pixels, min(header.width, header.height)
    if pixels is None:
        pixels = decode(content, header.width, header.height)
    if least > short_side:
        width, height = (max(1, round(side * short_side / least)) for side in (header.width, header.height))
        pixels = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS))
    encoded: bytes = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality, "RGB", "420")
    stays = header.pixels is None and least <= short_side and len(content) <= len(encoded)
    return content if stays else encoded


def fault(content: bytes) -> str | None:
    """Why an image cannot be decoded; None if it can."""
    try:
        header = look(content)
        if header.pixels is None:
            decode(content, header.width, header.height)
    except BrokenImageError as error:
        return str(error)
    return None

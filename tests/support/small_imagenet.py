"""Writes a small set with the irregularities of ImageNet's images, in folders of classes."""

from __future__ import annotations

import colorsys
import io
from pathlib import Path

import numpy as np
from PIL import Image

_VALIDATION_SHARE = 10
# In the training split, besides one image in fifty that is grey.
_ODD = {"CMYK": 3, "PNG": 1}
_GREY = 50


def write_images(folder: Path, *, images: int, classes: int, size: int, broken: int = 0, seed: int = 0) -> None:
    """Write ``train/CLASS/`` and ``val/CLASS/``, of which the latter has one image in ten.

    Args:
        size: pixels of most images' longer side.
        broken: training images that cannot be decoded, every second of them cut short.
        seed: decides every byte together with the other arguments.
    """
    rng = np.random.default_rng(seed)
    validation = images // _VALIDATION_SHARE
    train = images - validation
    kinds = [kind for kind, count in _ODD.items() for _ in range(count)] + ["broken"] * broken
    kinds = list(rng.permutation(kinds + ["L"] * (train // _GREY) + ["RGB"] * (train - train // _GREY - len(kinds))))
    for split, split_kinds in (("train", kinds), ("val", ["RGB"] * validation)):
        for number, kind in enumerate(split_kinds):
            label = number % classes
            # ImageNet's names: the identifiers of classes have WordNet's form, and numbers have gaps.
            wnid = f"n{9_000_000 + 17 * label:08}"
            name = f"{wnid}_{3 * (number // classes) + 1}" if split == "train" else f"ILSVRC2012_val_{number + 1:08}"
            path = folder / split / wnid / f"{name}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            content = _encoded(_drawn(label / classes, size, rng), str(kind))
            if kind == "broken":
                content = content[: len(content) // 2] if number % 2 else rng.bytes(len(content))
            path.write_bytes(content)


def _drawn(hue: float, size: int, rng: np.random.Generator) -> Image.Image:
    """Grey clouds and noise, in the hue of a class."""
    longer = max(8, round(size * rng.choice([1.0, 1.0, 1.0, rng.uniform(0.5, 1.3)])))
    shorter = max(8, round(longer * rng.choice([0.75, 2 / 3, rng.uniform(0.5, 1.0)])))
    shape = (longer, shorter) if rng.random() < 0.75 else (shorter, longer)
    clouds = Image.fromarray(rng.integers(0, 256, (6, 8), np.uint8)).resize(shape, Image.Resampling.BICUBIC)
    noise = Image.fromarray(rng.integers(0, 256, (shape[1], shape[0], 3), np.uint8))
    colour = Image.new("RGB", shape, tuple(round(255 * part) for part in colorsys.hsv_to_rgb(hue, 0.8, 0.9)))
    return Image.blend(Image.blend(clouds.convert("RGB"), noise, 0.1), colour, 0.6)


def _encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.convert(kind if kind in ("L", "CMYK") else "RGB").save(buffer, "PNG" if kind == "PNG" else "JPEG", quality=90)
    return buffer.getvalue()

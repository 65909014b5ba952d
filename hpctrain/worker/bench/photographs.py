"""A small set of photographs for timing loaders, as class folders and as shards."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from hpctrain.common.shards.make import Sharding, make_shards

_WIDTH, _HEIGHT = 500, 375
# With this JPEG quality a file of this size has about as many bytes as ImageNet's on average, 110 kB.
_QUALITY = 98

# Key, the bytes of its file, and its label.
Photograph = tuple[str, bytes, int]


def photographs(count: int, seed: int = 0) -> Iterator[Photograph]:
    """JPEG files of 500 x 375 pixels, cut from the two photographs that scikit-learn ships."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    random = np.random.default_rng(seed)
    whole = [Image.fromarray(image) for image in load_sample_images().images]
    for number in range(count):
        label = number % len(whole)
        width = int(random.integers(_WIDTH * 4 // 5, 569))
        height = width * _HEIGHT // _WIDTH
        left, top = (int(random.integers(room)) for room in (641 - width, 428 - height))
        box = (left, top, left + width, top + height)
        file = io.BytesIO()
        whole[label].resize((_WIDTH, _HEIGHT), Image.Resampling.LANCZOS, box).save(file, "JPEG", quality=_QUALITY)
        yield f"{number:06}", file.getvalue(), label


def write_folders(folder: Path, photographs: Iterable[Photograph]) -> list[tuple[Path, int]]:
    """Write train/ and val/ with class folders; val/ has the first image of each class in train/.

    Returns:
        The files of train/ and their labels.
    """
    files = []
    for key, content, label in photographs:
        file, first = (folder / split / f"n{label:08}" / f"{key}.jpg" for split in ("train", "val"))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        if not first.parent.exists():
            first.parent.mkdir(parents=True)
            first.write_bytes(content)
        files.append((file, label))
    return files


def write_shards(folder: Path, source: Path, shard_samples: int) -> None:
    """Make the shards of :func:`write_folders`' folder with ``hpctrain data shard``."""
    make_shards(Sharding(source=source, folder=folder, shard_samples=shard_samples), map, lambda words: None)

"""Images per second of several loaders, each with the same number of processes, over the same photographs.

``python loader.py OUT.json ROUNDS IMAGE_SIZE DATA WORKERS...``; DATA is a folder of shards, or empty for photographs
that are made for it. In each round the loaders have the cores one after the other; the others wait.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import simplejpeg

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.shards.make import Sharding, make_shards
from hpctrain.common.shards.read import open_shards
from hpctrain.worker.bench import other_loaders
from hpctrain.worker.bench.in_turn import rotated
from hpctrain.worker.bench.other_loaders import Epoch, Files
from hpctrain.worker.data.loader import ImageNet

_MADE = 384
# How many photographs of a given folder are used, which fit into memory and a round.
_MOST = 768
_BATCH = 64
# Small, since webdataset divides the shards among its processes, each of which needs equally many.
_SHARD_SAMPLES = 32


def hpctrain_loader(folder: Path, images: int, size: int, workers: int, stack: ExitStack) -> Epoch:
    """hpctrain's loader with the augmentation of published recipes, in one order."""
    source = stack.enter_context(contextlib.closing(ImageNet(folder, "train", _recipe(size, workers))))
    order = np.arange(images)

    def epoch(number: int) -> None:
        stream = source.stream(np.array_split(order, -(-images // _BATCH)), number)
        with contextlib.closing(stream):
            other_loaders.require_all(images, (len(samples) for samples in stream))

    return epoch


def _recipe(size: int, workers: int) -> Recipe:
    """The digits' recipe with photographs as its data; nothing is trained."""
    recipe = load_recipe("digits")
    images = recipe.images.model_copy(update={"size": size})
    data = recipe.data.model_copy(update={"name": "imagenet", "workers": workers})
    return recipe.model_copy(update={"images": images, "data": data})


def measure(
    shards: Path, files: Files, size: int, workers: list[int], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """The seconds per image of each variant in each round, by number of workers and variant.

    Args:
        shards: a folder of shards whose training images are those of the files.
    """
    count = len(files)
    seconds: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        tars = sorted(shards.glob("train-*.tar"))
        variants: dict[tuple[int, str], Epoch] = {}
        for number in workers:
            variants[number, "hpctrain"] = hpctrain_loader(shards, count, size, number, stack)
            variants[number, "torch, Pillow"] = other_loaders.torch_folder(files, size, number, _BATCH)
            variants[number, "webdataset, Pillow"] = other_loaders.webdataset(tars, count, size, number, _BATCH)
            variants[number, "decoding alone"] = other_loaders.raw_decode(files, number, stack)
        for (number, variant), epoch in variants.items():
            # Not timed: the first epoch starts processes.
            epoch(0)
            seconds.setdefault(str(number), {})[variant] = []
        for turn in range(1, rounds + 1):
            for number, variant in rotated(list(variants), turn):
                begin = time.perf_counter()
                variants[number, variant](turn)
                seconds[str(number)][variant].append((time.perf_counter() - begin) / count)
    return seconds


def _photographs(data: str) -> Iterator[Photograph]:
    """The images of the folder that every decoder can read, or generated ones if there is no folder."""
    if not data:
        yield from photographs(_MADE)
        return
    shards = open_shards(Path(data), "train")
    for index in range(len(shards)):
        content = shards.read(index)
        with contextlib.suppress(ValueError):
            simplejpeg.decode_jpeg(content)
            yield f"{index:08}", content, int(shards.labels[index])
    shards.close()


def main(out: str, rounds: str, size: str, data: str, *workers: str) -> None:
    chosen = list(itertools.islice(_photographs(data), _MOST))
    if not chosen:
        raise HpctrainError(
            "HT-bench-no-images",
            "{data}: none of its training images can be decoded",
            "leave --data out, or name others",
            data=data,
        )
    with tempfile.TemporaryDirectory(prefix="hpctrain-photographs-") as name:
        files = write_folders(Path(name) / "files", chosen)
        write_shards(Path(name) / "shards", Path(name) / "files", _SHARD_SAMPLES)
        seconds = measure(Path(name) / "shards", files, int(size), [int(number) for number in workers], int(rounds))
    bytes_each = sum(len(content) for _, content, _ in chosen) / len(chosen)
    Path(out).write_text(json.dumps({"seconds": seconds, "images": len(chosen), "bytes_each": round(bytes_each)}))


if __name__ == "__main__":
    main(*sys.argv[1:])


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

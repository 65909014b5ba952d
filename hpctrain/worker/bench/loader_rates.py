"""Images per second of hpctrain's loader, by the number of its processes.

``python loader_rates.py OUT.json ROUNDS IMAGE_SIZE DATA WORKERS...``; DATA is a folder of shards, or empty for
photographs that are made for it. In each round the loaders have the cores one after the other; the others wait. A pass
takes the photographs as often as all processes need to be busy, and its rate is that between a quarter and three
quarters of it: before, the first batches are made, and at the end nothing is left to make in advance.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import numpy as np

from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.shards.make import ShardRequest, make_shards
from hpctrain.worker.bench.in_turn import rotated
from hpctrain.worker.data.image_loader import ImageNet

MADE = 384
BATCH = 64
# The least images of a pass, and those for each process: what PyTorch's DataLoader makes in advance, three times.
_PASS, _PASS_OF_WORKER = 768, 384
# How many photographs of a given folder are used, which a round can take.
_MOST = 768
# Small, since webdataset divides the shards among its processes, each of which needs equally many.
SHARD_SAMPLES = 32
_WIDTH, _HEIGHT = 500, 375
# With this JPEG quality a file of this size has about as many bytes as ImageNet's on average, 110 kB.
_QUALITY = 98

# Key, the bytes of its file, and its label.
Photograph = tuple[str, bytes, int]
# Called with the epoch's number; gives the lengths of the batches of all images as they come.
Epoch = Callable[[int], Iterable[int]]
T = TypeVar("T")


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
    make_shards(ShardRequest(source=source, folder=folder, shard_samples=shard_samples), map, lambda words: None)


def images_of_pass(images: int, workers: int) -> int:
    """How many images a pass has, in which each of ``images`` comes equally often."""
    return -(-max(_PASS, _PASS_OF_WORKER * workers) // images) * images


def hpctrain_loader(folder: Path, size: int, workers: int, stack: ExitStack) -> Epoch:
    """hpctrain's loader with the augmentation of published recipes, in one order."""
    source = stack.enter_context(contextlib.closing(ImageNet(folder, "train", _recipe(size, workers))))
    count = images_of_pass(len(source), workers)
    order = np.resize(np.arange(len(source)), count)
    return lambda number: map(len, source.stream(np.array_split(order, -(-count // BATCH)), number))


def _recipe(size: int, workers: int) -> Recipe:
    """The digits' recipe with photographs as its data; nothing is trained."""
    recipe = load_recipe("digits")
    images = recipe.images.model_copy(update={"size": size})
    data = recipe.data.model_copy(update={"name": "imagenet", "workers": workers, "limit": _MOST})
    return recipe.model_copy(update={"images": images, "data": data})


def steady_seconds(batches: Iterable[int]) -> float:
    """The seconds an image takes between a quarter and three quarters of a pass, or over all of a few batches.

    Args:
        batches: the number of images in each batch, as they come.
    """
    come, times = [0], [time.perf_counter()]
    for length in batches:
        come.append(come[-1] + length)
        times.append(time.perf_counter())
    begin, end = np.searchsorted(come, [come[-1] / 4, 3 * come[-1] / 4]) if len(come) > 4 else (0, -1)
    return (times[end] - times[begin]) / (come[end] - come[begin])


def time_epochs(epochs: Mapping[T, Epoch], rounds: int) -> dict[T, list[float]]:
    """The seconds an image takes with each loader in each round, in turn."""
    for epoch in epochs.values():
        # Not timed: the first epoch starts processes.
        steady_seconds(epoch(0))
    seconds: dict[T, list[float]] = {name: [] for name in epochs}
    for number in range(1, rounds + 1):
        for name in rotated(list(epochs), number):
            seconds[name].append(steady_seconds(epochs[name](number)))
    return seconds


def main(out: str, rounds: str, size: str, data: str, *workers: str) -> None:
    with ExitStack() as stack:
        folder = Path(data)
        if not data:
            made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hpctrain-photographs-")))
            folder = made / "shards"
            write_folders(made / "files", photographs(MADE))
            write_shards(folder, made / "files", SHARD_SAMPLES)
        epochs = {number: hpctrain_loader(folder, int(size), int(number), stack) for number in workers}
        Path(out).write_text(json.dumps({"seconds": time_epochs(epochs, int(rounds))}))


if __name__ == "__main__":
    main(*sys.argv[1:])

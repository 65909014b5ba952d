"""Images per second of several loaders, each with the same number of processes, over the same photographs.

``python loader_rates.py OUT.json ROUNDS IMAGE_SIZE DATA WORKERS...``; DATA is a folder of shards, or empty for
photographs that are made for it. In each round the loaders have the cores one after the other; the others wait. A pass
takes the photographs as often as all processes need to be busy, and its rate is that between a quarter and three
quarters of it: before, the first batches are made, and at the end nothing is left to make in advance.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.shards.image_shards import open_shards
from hpctrain.common.shards.make import ShardRequest, make_shards
from hpctrain.worker.bench.in_turn import rotated
from hpctrain.worker.data.image_loader import ImageNet
from hpctrain.worker.data.workers import KEPT_MEMORY

_MADE = 384
# The least images of a pass, and those for each process: what PyTorch's DataLoader makes in advance, three times.
_PASS, _PASS_OF_WORKER = 768, 384
# How many photographs of a given folder are used, which fit into memory and a round.
_MOST = 768
_BATCH = 64
# Small, since webdataset divides the shards among its processes, each of which needs equally many.
_SHARD_SAMPLES = 32
_WIDTH, _HEIGHT = 500, 375
# With this JPEG quality a file of this size has about as many bytes as ImageNet's on average, 110 kB.
_QUALITY = 98

# Key, the bytes of its file, and its label.
Photograph = tuple[str, bytes, int]
# Called with the epoch's number; gives the lengths of the batches of all images as they come.
Epoch = Callable[[int], Iterable[int]]
Files = Sequence[tuple[Path, int]]
# Another loader, from files and shards, the side of images, the number of processes, and the size of a batch.
OtherLoader = Callable[[Files, Sequence[Path], int, int, int], Epoch]


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


def hpctrain_loader(folder: Path, images: int, size: int, workers: int, stack: ExitStack) -> tuple[ImageNet, Epoch]:
    """hpctrain's loader with the augmentation of published recipes, in one order."""
    source = stack.enter_context(contextlib.closing(ImageNet(folder, "train", _recipe(size, workers))))
    order = np.resize(np.arange(len(source)), images)
    return source, lambda number: map(len, source.stream(np.array_split(order, -(-images // _BATCH)), number))


def _recipe(size: int, workers: int) -> Recipe:
    """The digits' recipe with photographs as its data; nothing is trained."""
    recipe = load_recipe("digits")
    images = recipe.images.model_copy(update={"size": size})
    data = recipe.data.model_copy(update={"name": "imagenet", "workers": workers})
    return recipe.model_copy(update={"images": images, "data": data})


def steady_seconds(batches: Iterable[int], count: int) -> float:
    """The seconds an image takes between a quarter and three quarters of a pass, or over all of a single batch.

    Args:
        batches: the number of images in each batch, as they come.
        count: how many images they are together.

    Raises:
        RuntimeError: they are not.
    """
    come, times = [0], [time.perf_counter()]
    for length in batches:
        come.append(come[-1] + length)
        times.append(time.perf_counter())
    if come[-1] != count:
        raise RuntimeError(f"{come[-1]} of {count} images came")
    begin, end = np.searchsorted(come, [count / 4, 3 * count / 4]) if len(come) > 4 else (0, -1)
    return (times[end] - times[begin]) / (come[end] - come[begin])


def decoding_alone(files: Files, workers: int, stack: ExitStack) -> tuple[Counter[str], Epoch]:
    """Only simplejpeg, decoding whole photographs from memory in as many processes.

    They keep freed memory, as hpctrain's workers do.

    Returns:
        A counter of the processor's time that all of them took so far, in nanoseconds, and what runs an epoch.
    """
    nanoseconds: Counter[str] = Counter()
    program = Path(__file__).with_name("raw_decode.py")
    processes = []
    for start in range(workers):
        paths = json.dumps([str(path) for path, _ in files[start::workers]])
        process = subprocess.Popen(
            [sys.executable, program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=KEPT_MEMORY | os.environ,
        )
        processes.append(stack.enter_context(process))
        # Killed, because closing its input is not enough: other loaders' forked processes hold that open too.
        stack.callback(process.kill)
        _send_line(process, paths)

    def epoch(_: int) -> Iterator[int]:
        for process in processes:
            _send_line(process, "again")
        counts, spent = zip(*map(_read_answer, processes), strict=True)
        nanoseconds["processor"] += sum(spent)
        yield sum(counts)

    return nanoseconds, epoch


def _send_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def _read_answer(process: subprocess.Popen[str]) -> tuple[int, int]:
    assert process.stdout
    count, spent = process.stdout.readline().split()
    return int(count), int(spent)


def measure(
    shards: Path,
    files: Files,
    size: int,
    workers: list[int],
    rounds: int,
    others: Mapping[str, OtherLoader] = {},
) -> dict[str, Any]:
    """Measure all variants.

    Args:
        shards: a folder of shards whose training images are those of the files.
        others: further loaders by name.

    Returns:
        ``seconds``: per image of each variant in each round, by number of workers and variant; ``processor``: the same
        of the processor's time of hpctrain's workers and of decoding alone; ``stages``: by number of workers, the
        microseconds per image of each stage of hpctrain's workers, of all of them together, and of the processor in
        them and in the rank (``rank's processor``).
    """
    seconds: dict[str, dict[str, list[float]]] = {}
    processor: dict[str, dict[str, list[float]]] = {}
    stages: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        tars = sorted(shards.glob("train-*.tar"))
        variants: dict[tuple[int, str], Epoch] = {}
        counts: dict[int, int] = {}
        own: dict[int, ImageNet] = {}
        spent: dict[tuple[int, str], Mapping[str, int]] = {}
        rank: Counter[int] = Counter()
        for number in workers:
            times = -(-max(_PASS, _PASS_OF_WORKER * number) // len(files))
            many, counts[number] = list(files) * times, times * len(files)
            own[number], variants[number, "hpctrain"] = hpctrain_loader(shards, counts[number], size, number, stack)
            for name, make in others.items():
                variants[number, name] = make(many, tars * times, size, number, _BATCH)
            spent[number, "hpctrain"] = own[number].nanoseconds
            alone, variants[number, "decoding alone"] = decoding_alone(many, number, stack)
            spent[number, "decoding alone"] = alone
        for (number, variant), epoch in variants.items():
            # Not timed: the first epoch starts processes.
            steady_seconds(epoch(0), counts[number])
            seconds.setdefault(str(number), {})[variant] = []
            processor.setdefault(str(number), {})
        before = {number: Counter(source.nanoseconds) for number, source in own.items()}
        for turn in range(1, rounds + 1):
            for number, variant in rotated(list(variants), turn):
                begin, counted = time.process_time_ns(), spent.get((number, variant), {})
                busy = counted.get("processor", 0)
                took = steady_seconds(variants[number, variant](turn), counts[number])
                seconds[str(number)][variant].append(took)
                if counted:
                    each = (counted["processor"] - busy) / 1e9 / counts[number]
                    processor[str(number)].setdefault(variant, []).append(each)
                if variant == "hpctrain":
                    rank[number] += time.process_time_ns() - begin
        for number, source in own.items():
            stage_ns = {stage: passed - before[number][stage] for stage, passed in source.nanoseconds.items()}
            stage_ns["rank's processor"] = rank[number]
            stages[str(number)] = {stage: passed / 1e3 / rounds / counts[number] for stage, passed in stage_ns.items()}
    return {"seconds": seconds, "processor": processor, "stages": stages}


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


def compare(
    rounds: int, size: int, data: str, workers: list[int], others: Mapping[str, OtherLoader] = {}
) -> dict[str, Any]:
    """What :func:`measure` says of the photographs of a folder of shards, or of those that are made for it."""
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
        measured = measure(Path(name) / "shards", files, size, workers, rounds, others)
    bytes_each = sum(len(content) for _, content, _ in chosen) / len(chosen)
    return {**measured, "images": len(chosen), "bytes_each": round(bytes_each)}


def main(out: str, rounds: str, size: str, data: str, *workers: str) -> None:
    Path(out).write_text(json.dumps(compare(int(rounds), int(size), data, [int(number) for number in workers])))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Compares hpctrain's loader with PyTorch's DataLoader and webdataset, both with Pillow, and with decoding alone.

``python benchmarks/loaders.py --workers 1 2 --rounds 10``: as ``hpctrain bench loader``, on the same photographs.
Prints a row of JSON for each loader and number of processes. The limit is simplejpeg, which decodes whole photographs
from memory in as many processes, with the settings of memory that hpctrain's processes have.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import math
import multiprocessing
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from hpctrain.report.benchmarks import ratio
from hpctrain.worker.bench.loader_rates import (
    BATCH,
    MADE,
    SHARD_SAMPLES,
    Epoch,
    hpctrain_loader,
    images_of_pass,
    photographs,
    time_epochs,
    write_folders,
    write_shards,
)
from hpctrain.worker.data.workers import keep_freed_memory

Files = Sequence[tuple[Path, int]]
_OURS, _LIMIT = "hpctrain", "decoding alone"
_random = np.random.default_rng()


def random_crop_by_pillow(photograph: Image.Image, size: int) -> torch.Tensor:
    """Goyal et al.'s augmentation as usually implemented: a crop of random area and ratio, resized, flipped.

    Returns:
        uint8, shape (size, size, 3), like hpctrain's.
    """
    width, height = photograph.size
    for _ in range(10):
        area = width * height * _random.uniform(0.08, 1)
        ratio = math.exp(_random.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if wide <= width and tall <= height:
            left, top = (int(_random.integers(room + 1)) for room in (width - wide, height - tall))
            break
    else:
        wide = tall = min(width, height)
        left, top = (width - wide) // 2, (height - tall) // 2
    cut = photograph.crop((left, top, left + wide, top + tall))
    image = cut.resize((size, size), Image.Resampling.BILINEAR)
    if _random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image))


class Folder(Dataset[tuple[torch.Tensor, int]]):
    """Image files and their labels, read with Pillow."""

    def __init__(self, files: Files, size: int) -> None:
        self._files, self._size = files, size

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self._files[index]
        with Image.open(path, formats=("JPEG",)) as photograph:
            return random_crop_by_pillow(photograph.convert("RGB"), self._size), label


def torch_folder(files: Files, size: int, workers: int) -> Epoch:
    """PyTorch's DataLoader over a folder of files, its processes kept between epochs."""
    loader = DataLoader(Folder(files, size), BATCH, num_workers=workers, persistent_workers=True)
    return lambda _: (len(labels) for _, labels in loader)


def webdataset(shards: Sequence[Path], size: int, workers: int) -> Epoch:
    """webdataset's pipeline, each process with its part of the shards."""
    import webdataset as wds

    def decoded(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
        with Image.open(io.BytesIO(sample["jpg"]), formats=("JPEG",)) as photograph:
            return random_crop_by_pillow(photograph.convert("RGB"), size), int(sample["cls"])

    pipeline = wds.DataPipeline(
        wds.SimpleShardList([str(shard) for shard in shards]),
        wds.split_by_worker,
        wds.tarfile_to_samples(),
        wds.map(decoded),
        wds.batched(BATCH),
    )
    loader = wds.WebLoader(pipeline, batch_size=None, num_workers=workers, persistent_workers=True)
    return lambda _: (len(labels) for _, labels in loader)


@functools.cache
def content_of(path: Path) -> bytes:
    """The bytes of a file, which stay in this process's memory."""
    return path.read_bytes()


def decode(paths: Sequence[Path]) -> int:
    """Decode whole photographs; returns their number."""
    for path in paths:
        simplejpeg.decode_jpeg(content_of(path))
    return len(paths)


def decoding_alone(files: Files, workers: int, stack: ExitStack) -> Epoch:
    """Only simplejpeg, in processes that do nothing else."""
    pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(workers, keep_freed_memory))
    shares = [[path for path, _ in files[start::workers]] for start in range(workers)]

    def epoch(_: int) -> Iterator[int]:
        yield sum(pool.map(decode, shares, chunksize=1))

    return epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--image-size", type=int, default=224)
    options = parser.parse_args()
    epochs: dict[tuple[int, str], Epoch] = {}
    with tempfile.TemporaryDirectory(prefix="hpctrain-photographs-") as name, ExitStack() as stack:
        folder, size = Path(name), options.image_size
        files = write_folders(folder / "files", photographs(MADE))
        write_shards(folder / "shards", folder / "files", SHARD_SAMPLES)
        tars = sorted((folder / "shards").glob("train-*.tar"))
        for workers in options.workers:
            times = images_of_pass(MADE, workers) // MADE
            epochs[workers, _OURS] = hpctrain_loader(folder / "shards", size, workers, stack)
            epochs[workers, "torch, Pillow"] = torch_folder(files * times, size, workers)
            epochs[workers, "webdataset, Pillow"] = webdataset(tars * times, size, workers)
            epochs[workers, _LIMIT] = decoding_alone(files * times, workers, stack)
        seconds = time_epochs(epochs, options.rounds)
    for workers, loader in epochs:
        own = {name: times for (number, name), times in seconds.items() if number == workers}
        row = {
            "workers": workers,
            "variant": loader,
            "samples_per_s": 1 / statistics.median(own[loader]),
            "share_of_limit": ratio(own, _LIMIT, loader),
            "hpctrain_to_it": ratio(own, loader, _OURS),
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()

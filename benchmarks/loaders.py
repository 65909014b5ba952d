"""Compares hpctrain's loader with PyTorch's DataLoader and webdataset, both with Pillow, and with decoding alone.

``python benchmarks/loaders.py --workers 1 2 --rounds 10``: as ``hpctrain bench loader``, on the same photographs.
Prints a row of JSON for each loader and number of processes.
"""

from __future__ import annotations

import argparse
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from hpctrain.report.benchmarks import loader_rows
from hpctrain.worker.bench.loader_rates import Epoch, Files, compare

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


def torch_folder(files: Files, _: Sequence[Path], size: int, workers: int, batch: int) -> Epoch:
    """PyTorch's DataLoader over a folder of files, its processes kept between epochs."""
    loader = DataLoader(Folder(files, size), batch, num_workers=workers, persistent_workers=True)
    return lambda _: (len(labels) for _, labels in loader)


def webdataset(_: Files, shards: Sequence[Path], size: int, workers: int, batch: int) -> Epoch:
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
        wds.batched(batch),
    )
    loader = wds.WebLoader(pipeline, batch_size=None, num_workers=workers, persistent_workers=True)
    return lambda _: (len(labels) for _, labels in loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--image-size", type=int, default=224)
    options = parser.parse_args()
    others = {"torch, Pillow": torch_folder, "webdataset, Pillow": webdataset}
    measured = compare(options.rounds, options.image_size, "", options.workers, others)
    for row in loader_rows(measured["seconds"], measured["processor"], measured["stages"]):
        print(json.dumps(row))


if __name__ == "__main__":
    main()

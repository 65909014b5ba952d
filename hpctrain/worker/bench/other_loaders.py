"""The baselines of the loader: PyTorch's DataLoader and webdataset, both with Pillow, and decoding alone."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from hpctrain.worker.data.workers import KEPT_MEMORY

# Called with the epoch's number; gives the lengths of the batches of all images as they come.
Epoch = Callable[[int], Iterable[int]]
Files = Sequence[tuple[Path, int]]


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


def torch_folder(files: Files, size: int, workers: int, batch: int) -> Epoch:
    """PyTorch's DataLoader over a folder of files, its processes kept between epochs."""
    loader = DataLoader(Folder(files, size), batch, num_workers=workers, persistent_workers=True)
    return lambda _: (len(labels) for _, labels in loader)


def webdataset(shards: Sequence[Path], size: int, workers: int, batch: int) -> Epoch:
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


def raw_decode(files: Files, workers: int, stack: ExitStack) -> tuple[Counter[str], Epoch]:
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

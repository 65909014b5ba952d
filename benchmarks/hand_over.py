"""What the hand over of images costs the rank: ``python benchmarks/hand_over.py [WORKERS...]``.

The photographs are so small that workers make them in no time, though the images have 224 pixels. The processor's time
that the rank takes for an image bounds how many it can take, whatever the number of workers; with many workers on few
cores nothing else can be read from it.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from hpctrain.common.recipes.load import load_recipe
from hpctrain.worker.bench.loader_rates import write_folders, write_shards
from hpctrain.worker.data.image_loader import ImageNet

_BATCH, _PIECES, _SIDE = 256, 32, 16


def main(*workers: str) -> None:
    with tempfile.TemporaryDirectory(prefix="hpctrain-hand-over-") as name:
        file = io.BytesIO()
        Image.new("RGB", (_SIDE, _SIDE)).save(file, "JPEG")
        folder = Path(name)
        write_folders(folder / "files", ((f"{number:06}", file.getvalue(), 0) for number in range(_BATCH)))
        write_shards(folder / "shards", folder / "files", _BATCH)
        print("| workers | images/s | rank's processor time an image, us | images/s that allows |")
        print("|--:|--:|--:|--:|")
        for count in map(int, workers or ("1", "2", "8", "14")):
            digits = load_recipe("digits")
            data = digits.data.model_copy(update={"name": "imagenet", "workers": count})
            with contextlib.closing(
                ImageNet(folder / "shards", "train", digits.model_copy(update={"data": data}))
            ) as source:
                for epoch in range(2):
                    wall, own = time.perf_counter(), time.process_time()
                    for _ in source.stream([np.arange(_BATCH)] * _PIECES, epoch):
                        pass
                    wall, own = time.perf_counter() - wall, time.process_time() - own
            images = _BATCH * _PIECES
            print(f"| {count} | {images / wall:.0f} | {own / images * 1e6:.2f} | {images / own:.0f} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Images a second of the loaders, by the number of their processes, as ``hpctrain bench loader`` measures them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import time

import numpy as np
import pytest
import torch

from hpctrain.common.recipes.load import load_recipe
from hpctrain.worker.bench.loader_rates import photographs, write_folders, write_shards
from hpctrain.worker.data.gpu_decoder import CardPool
from hpctrain.worker.data.image_loader import ImageNet
from support.gpu_runs import GPUS, launch, of_make_gpu

pytestmark = of_make_gpu


def test_images_a_second_by_workers(tmp_path, note):
    """On 1, 4, 8 and 14 processes, as far as there are cores."""
    cores = len(os.sched_getaffinity(0))
    workers = [count for count in (1, 4, 8, 14) if count <= max(1, cores - 1)]
    options = [word for count in workers for word in ("--workers", str(count))]
    rounds = "5" if GPUS else "1"
    done = launch(tmp_path, "bench", "loader", *options, "--rounds", rounds, "--json", seconds=220)
    found = json.loads(done.stdout[done.stdout.index("{") :])
    note(workers=workers, cores=cores, found=found)
    assert found


@pytest.mark.skipif(not GPUS, reason="PyTorch sees no GPU")
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
def test_photographs_decoded_by_the_gpu(tmp_path, note):
    """``data.decode: gpu``: images a second while nothing else uses the card, and how close they are to a process's."""
    write_folders(tmp_path / "files", photographs(256))
    write_shards(tmp_path / "shards", tmp_path / "files", 64)
    digits = load_recipe("digits")
    data = digits.data.model_copy(update={"name": "imagenet", "workers": 2, "decode": "full"})
    recipe = digits.model_copy(update={"data": data})
    pool = CardPool(tmp_path / "shards", recipe, torch.device("cuda", 0))
    with (
        contextlib.closing(ImageNet(tmp_path / "shards", "train", recipe)) as process,
        contextlib.closing(ImageNet(tmp_path / "shards", "train", recipe, pool)) as card,
    ):
        expected = next(process.stream([np.arange(256)], 0)).images.astype(np.float32)
        found = next(card.stream([np.arange(256)], 0)).images.cpu().numpy()
        errors = np.square(found - expected).mean(axis=(1, 2, 3))
        ratios = 10 * np.log10(255**2 / np.maximum(errors, 1e-9))
        times = [time.perf_counter()]
        for _ in card.stream([np.arange(256)] * 40, 1):
            torch.cuda.synchronize()
            times.append(time.perf_counter())
    note(
        images_a_second=256 * 20 / (times[30] - times[10]),
        psnr_median=float(np.median(ratios)),
        psnr_least=float(ratios.min()),
    )
    assert ratios.min() > 25

"""Images per second of ResNet-50's training step, in plain PyTorch and with hpctrain, in turn in one run on GPUs.

``hpctrain run images_per_second.py -- OUT.json '{}'``. In bfloat16, channels last, compiled. Each alternative has a
network of its own with the same weights; what feeds it is one batch that stays on the device, or hpctrain's loader from
photographs in shards.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import hpctrain as ht
from hpctrain.common.recipes.load import load_recipe
from hpctrain.worker.bench.in_turn import Call, TimedGroup, time_in_turn
from hpctrain.worker.bench.loader_rates import photographs, write_folders, write_shards
from hpctrain.worker.data.image_loader import ImageNet
from hpctrain.worker.models.torch_resnet import resnet50

Batch = tuple[torch.Tensor, torch.Tensor]
# Of a rank, and steps in a round.
BATCH, IMAGE_SIZE, WORKERS, STEPS, ROUNDS = 256, 224, 12, 10, 5
# Workers prepare a few batches in advance, but none beyond the end of an epoch.
_BATCHES = 64


def stream(source: ImageNet, device: torch.device) -> Iterator[Batch]:
    """Batches of augmented photographs on a device, of the same images again and again."""
    order = np.split(np.resize(np.arange(len(source)), _BATCHES * BATCH), _BATCHES)
    for epoch in itertools.count():
        for samples in source.stream(order, epoch):
            images = torch.from_numpy(samples.images).to(device).permute(0, 3, 1, 2)
            yield images, torch.from_numpy(samples.labels).to(device)


def network(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The network with its weights, equal at every call, and its optimizer."""
    torch.manual_seed(0)
    model = resnet50(norm=nn.BatchNorm2d).to(device, memory_format=torch.channels_last)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Batch]) -> Call:
    """A round of training steps, until the device has done them."""
    forward = torch.compile(model)

    def run() -> None:
        for images, labels in itertools.islice(batches, STEPS):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = nn.functional.cross_entropy(forward((images.float() - 118) / 58), labels)
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()

    return run


def main(out: str, *_: Any) -> None:
    """Measure, and write the result to the file ``out``."""
    comm = ht.init()
    device = torch.device("cuda", comm.local_rank)
    torch.cuda.set_device(device)
    random = torch.Generator().manual_seed(comm.rank)
    shape = (BATCH, IMAGE_SIZE, IMAGE_SIZE, 3)
    images = torch.randint(256, shape, dtype=torch.uint8, generator=random).permute(0, 3, 1, 2)
    fixed = images.to(device), torch.randint(1000, (BATCH,), generator=random).to(device)
    recipe = load_recipe("digits")
    changes = {
        "images": recipe.images.model_copy(update={"size": IMAGE_SIZE}),
        "data": recipe.data.model_copy(update={"name": "imagenet", "workers": WORKERS}),
    }
    with tempfile.TemporaryDirectory(prefix="hpctrain-gpu-") as name:
        write_folders(Path(name) / "files", photographs(BATCH))
        write_shards(Path(name) / "shards", Path(name) / "files", 64)
        source = ImageNet(Path(name) / "shards", "train", recipe.model_copy(update=changes))
        sources = {"one batch on the device": itertools.repeat(fixed), "from the loader": stream(source, device)}
        calls = {}
        for where, batches in sources.items():
            calls[f"PyTorch, {where}"] = steps(*network(device), batches)
            calls[f"hpctrain, {where}"] = steps(*ht.distribute(*network(device)), batches)
        seconds = time_in_turn(MPI.COMM_WORLD, [TimedGroup(calls=calls)], rounds=ROUNDS)
        source.close()
    if comm.rank == 0:
        done = comm.size * BATCH * STEPS
        rates = {name: [done / each for each in times] for name, times in seconds.items()}
        Path(out).write_text(json.dumps({"images_per_second": rates}))


if __name__ == "__main__":
    main(*sys.argv[1:])

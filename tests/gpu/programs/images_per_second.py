"""Images per second of a residual network's training step, in plain PyTorch and with hpctrain, in turn in one run.

``hpctrain run images_per_second.py -- OUT.json '{…}'``. Each alternative has a network of its own with the same
weights; what feeds it is one batch that stays on the device, or hpctrain's loader from photographs in shards.
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
from hpctrain.worker.models.torch_resnet import resnet18, resnet50

Batch = tuple[torch.Tensor, torch.Tensor]
_SHARD_IMAGES = 64
# Workers prepare a few batches in advance, but none beyond the end of an epoch.
_BATCHES = 64


def shards(folder: Path, images: int) -> Path:
    """A folder of shards of generated photographs."""
    write_folders(folder / "files", photographs(images))
    write_shards(folder / "shards", folder / "files", _SHARD_IMAGES)
    return folder / "shards"


class FromLoader:
    """Batches of augmented photographs, without an end, on a device.

    Args:
        folder: the shards.
        options: as of :func:`main`.
    """

    def __init__(self, folder: Path, options: dict[str, Any], device: torch.device) -> None:
        recipe = load_recipe("digits")
        images = recipe.images.model_copy(update={"size": options["image_size"]})
        data = recipe.data.model_copy(update={"name": "imagenet", "workers": options["workers"]})
        self._source = ImageNet(folder, "train", recipe.model_copy(update={"images": images, "data": data}))
        self._batch, self._device = options["batch"], device
        self._batches = self._stream()

    def _stream(self) -> Iterator[Batch]:
        for epoch in itertools.count():
            # Of the same images again and again.
            order = np.resize(np.arange(len(self._source)), _BATCHES * self._batch)
            for samples in self._source.stream(np.split(order, _BATCHES), epoch):
                images = torch.from_numpy(samples.images).to(self._device).permute(0, 3, 1, 2)
                yield images, torch.from_numpy(samples.labels).to(self._device)

    def __call__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        """End the stream and its workers."""
        self._source.close()


def network(options: dict[str, Any], device: torch.device) -> nn.Module:
    """The network with its weights, equal at every call."""
    torch.manual_seed(0)
    build = {"resnet18": resnet18, "resnet50": resnet50}[options["model"]]
    return build(norm=nn.BatchNorm2d).to(device, memory_format=torch.channels_last)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any], batch: Any) -> Call:
    """``steps`` training steps on batches of ``batch()``, until the device has done them."""
    forward = torch.compile(model) if options["compile"] else model

    def run() -> None:
        for _ in range(options["steps"]):
            images, labels = batch()
            optimizer.zero_grad()
            with torch.autocast(images.device.type, torch.bfloat16):
                loss = nn.functional.cross_entropy(forward((images.float() - 118) / 58), labels)
            loss.backward()
            optimizer.step()
        if images.is_cuda:
            torch.cuda.synchronize()

    return run


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all alternatives."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def main(out: str, chosen: str) -> None:
    """Measure.

    Args:
        out: the file that gets the result.
        chosen: ``device``, ``model``, ``batch`` images a rank, ``image_size``, ``compile``, ``workers`` of the loader,
            ``steps`` a round, ``rounds``.
    """
    options = json.loads(chosen)
    comm = ht.init()
    cuda = options["device"] == "cuda"
    device = torch.device("cuda", comm.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    random = torch.Generator().manual_seed(comm.rank)
    size, count = options["image_size"], options["batch"]
    images = torch.randint(256, (count, size, size, 3), dtype=torch.uint8, generator=random).permute(0, 3, 1, 2)
    fixed = images.to(device), torch.randint(1000, (count,), generator=random).to(device)
    with tempfile.TemporaryDirectory(prefix="hpctrain-gpu-") as name:
        loader = FromLoader(shards(Path(name), max(count, 256 if cuda else count)), options, device)
        calls = {}
        for source, batch in (("one batch on the device", lambda: fixed), ("from the loader", loader)):
            plain = network(options, device)
            calls[f"PyTorch, {source}"] = step(plain, sgd(plain), options, batch)
            model = network(options, device)
            calls[f"hpctrain, {source}"] = step(*ht.distribute(model, sgd(model)), options, batch)
        seconds = time_in_turn(MPI.COMM_WORLD, [TimedGroup(calls=calls)], rounds=options["rounds"])
        loader.close()
    if comm.rank == 0:
        done = comm.size * count * options["steps"]
        rates = {name: [done / each for each in times] for name, times in seconds.items()}
        found = {"images_per_second": rates, "ranks": comm.size, "backend": comm.backend, "options": options}
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Times a step of a PyTorch recipe against a plain loop of the same network: ``python benchmarks/recipe_steps.py``.

One process and one thread of a CPU, by the processor's time, which a busy machine changes little. The plain loop is
timed with PyTorch's default kernels of SGD and with its fused ones, which recipes have, and without the hooks by which
hpctrain watches the steps of every optimizer of a process.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.optim import optimizer as hooks

from hpctrain.common.recipes.schema import Recipe
from hpctrain.worker import models
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.train.torch_trainer import TorchTrainer

# Model, samples, side of its images in pixels, rounds.
_CASES = [("digits_cnn", 32, 8, 300), ("digits_cnn", 256, 8, 60), ("resnet50", 4, 64, 9)]


def recipe(model: str, samples: int) -> Recipe:
    values = {
        "name": "timed",
        "source": "none",
        "reported": [{"metric": "test_accuracy", "value": 1.0}],
        "model": {"name": model},
        "data": {"name": "digits" if model == "digits_cnn" else "imagenet"},
        "batch": {"size": samples},
        "optimizer": {"name": "sgd", "learning_rate": 0.01, "momentum": 0.9},
        "epochs": 1,
    }
    return Recipe.model_validate_json(json.dumps(values))


def batch(model: str, samples: int, side: int) -> Samples:
    random = np.random.default_rng(0)
    if model == "digits_cnn":
        images = random.random((samples, side, side, 1), np.float32)
        return Samples(images=images, labels=random.integers(0, 10, samples))
    images = random.integers(0, 256, (samples, side, side, 3), np.uint8)
    return Samples(images=images, labels=random.integers(0, 1000, samples))


def plain(chosen: Recipe, given: Samples, *, fused: bool | None) -> Callable[[], object]:
    model: torch.nn.Module = models.build(chosen.model, "torch", SingleCommunicator("timed"), at_once=len(given.labels))
    optimizer = torch.optim.SGD(model.train().parameters(), 0.01, momentum=0.9, fused=fused)
    pixels, labels = torch.from_numpy(given.images).movedim(-1, 1), torch.from_numpy(given.labels)
    mean, deviation = (255 * torch.tensor(each).view(3, 1, 1) for each in (chosen.images.mean, chosen.images.deviation))

    def step() -> None:
        optimizer.zero_grad()
        images = pixels.float().sub_(mean).div_(deviation) if pixels.dtype == torch.uint8 else pixels
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def main() -> None:
    torch.set_num_threads(1)
    for model, samples, side, rounds in _CASES:
        chosen, given = recipe(model, samples), batch(model, samples, side)
        trainer = TorchTrainer(chosen, SingleCommunicator("timed"))
        calls: dict[str, Callable[[], object]] = {
            "plain": plain(chosen, given, fused=None),
            "plain, fused": plain(chosen, given, fused=True),
            "recipe": lambda trainer=trainer, given=given: trainer.step([given], 1, 1.0, 0.01, 1.0),  # type: ignore[misc]
        }
        tables = (hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks)
        watching = [dict(table) for table in tables]
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds + 3):
            for name, call in calls.items():
                for table, own in zip(tables, watching, strict=True):
                    table.clear()
                    table.update(own if name == "recipe" else {})
                begin = time.process_time()
                call()
                if number > 2:
                    seconds[name].append(time.process_time() - begin)
        print(f"{model}, {samples} samples, median of {rounds} rounds, load {os.getloadavg()[0]:.1f}")
        for name, each in seconds.items():
            ratio = statistics.median(own / other for own, other in zip(each, seconds["plain"], strict=True))
            print(f"  {name:14}{1e3 * statistics.median(each):9.2f} ms{ratio:8.3f}")


if __name__ == "__main__":
    main()

"""The recipe loop on some ranks: parameters after each case, for test_train_loop.py to compare.

Usage: train_loop.py OUTPUT, which gets ``OUTPUT-RANK.npz`` and rank 0's ``OUTPUT-CASE.jsonl``.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import recipe_runs
import torch
from recipe_runs import data, told

import hpctrain as ht
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.sections import ModelSettings
from hpctrain.worker import models
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.data.sampling import epoch_order, share
from hpctrain.worker.train.torch_trainer import TorchTrainer

BASE = {
    "optimizer": {"name": "sgd", "learning_rate": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "schedule": {"name": "cosine", "base_batch": 8, "warmup_epochs": 1},
}
# 61 samples in batches of 20 end with a single one: on several ranks, some have none
CASES = {
    "uneven": {"batch": {"size": 20}},
    "micro": {"batch": {"size": 20, "micro_batch": 4}},
    "clipped": {"batch": {"size": 16}, "optimizer": {**BASE["optimizer"], "clip_norm": 0.5}},
    "early": {"batch": {"size": 20, "micro_batch": 4}},
}


# The step whose batch has a pixel that is no number, on the last rank alone.
BAD_STEP = 3


def recipe(case: str, **values: object) -> Recipe:
    return recipe_runs.recipe(**{**BASE, **CASES[case], **values})


class Early(TorchTrainer):
    """Gives updates before it reads whether a step is finite, as on a GPU."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._updates_early = True


def reference(case: str) -> tuple[list[np.ndarray], float, int]:
    """Plain PyTorch in one process: parameters, test loss and right answers after the run."""
    settings = recipe(case)
    (train, test), size = data(), settings.batch.size
    torch.manual_seed(settings.seed)
    model = models.build(ModelSettings(name="digits_cnn"), "torch")
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, weight_decay=1e-3)
    images, labels = torch.from_numpy(train.images).permute(0, 3, 1, 2), torch.from_numpy(train.labels)
    steps, peak = -(-61 // size), 0.02 * size / 8
    for step in range(2 * steps):
        epoch, within = divmod(step, steps)
        rate = 0.02 + (peak - 0.02) * step / steps if epoch == 0 else peak * (1 + np.cos(np.pi * within / steps)) / 2
        optimizer.param_groups[0]["lr"] = rate
        batch = epoch_order(61, seed=3, epoch=epoch)[within * size : (within + 1) * size]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        if case == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    with torch.no_grad():
        logits = model(torch.from_numpy(test.images).permute(0, 3, 1, 2))
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(test.labels)).item()
    right = int((logits.argmax(1).numpy() == test.labels).sum())
    return [parameter.detach().numpy() for parameter in model.parameters()], loss, right


def overflow(comm: Communicator) -> dict[str, np.ndarray]:
    """Steps in fp16: a good one, one whose gradient is infinite on the last rank alone, and a good one again."""
    train, _ = data()
    settings = recipe_runs.recipe(**BASE, batch={"size": 8}, precision="fp16")
    trainer = TorchTrainer(settings.at(comm.size), comm)
    results = {}
    for number, factor in enumerate([1.0, np.inf if comm.rank == comm.size - 1 else 1.0, 1.0]):
        own = train[np.arange(8) + 8 * comm.rank]
        trainer.step([own], 1, factor / 8, 0.02, 1.0)
        flat = [parameter.detach().numpy().ravel() for parameter in trainer.model.parameters()]
        results[f"fp16 {number}"] = np.concatenate(flat)
        results[f"fp16 {number} scale"] = trainer.state()["scaler.scale"]
    return results


def faulty(comm: Communicator, output: str) -> dict[str, np.ndarray]:
    """What the run is told by the rule that ends it, with its parameters then; and those of one that skips the step."""
    train, _ = data()
    batch = epoch_order(len(train), seed=3, epoch=0)[20 * (BAD_STEP - 1) : 20 * BAD_STEP]
    images = train.images.copy()
    images[share(batch, comm.size - 1, comm.size).indices[0]] = np.nan
    broken = Samples(images=images, labels=train.labels)
    results = {}
    for rule in ("stop", "skip"):
        settings = recipe("uneven", numbers={"non_finite": rule})
        for name, kind in ((f"{rule} early", Early), (rule, TorchTrainer)):
            trainer = kind(settings, comm)
            found = told(
                lambda: recipe_runs.train(name, settings, comm, trainer, output, samples=broken)  # noqa: B023
            )
            results |= {f"{name} told": found, f"{name} ended": recipe_runs.parameters(trainer)}
    return results


def main(output: str) -> None:
    comm = ht.init()
    results = {}
    for case in CASES:
        trainer = (Early if case == "early" else TorchTrainer)(recipe(case), comm)
        recipe_runs.train(case, recipe(case), comm, trainer, output)
        results[case] = recipe_runs.parameters(trainer)
    results |= overflow(comm) | faulty(comm, output)
    np.savez(f"{output}-{comm.rank}.npz", **results)


if __name__ == "__main__":
    main(sys.argv[1])

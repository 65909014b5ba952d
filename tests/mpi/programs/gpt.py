"""A small GPT on some ranks: parameters and losses of each case, for test_gpt.py to compare.

Usage: gpt.py OUTPUT, which gets ``OUTPUT-RANK.npz`` and rank 0's ``OUTPUT-CASE.jsonl``.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import torch

import hpctrain as ht
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.smoke import smoke
from hpctrain.common.run.events import EventWriter
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data import open_sources
from hpctrain.worker.data.sampling import endless_order
from hpctrain.worker.models.torch_gpt import GPT
from hpctrain.worker.train.checkpoint import Checkpoints
from hpctrain.worker.train.loop import Loop
from hpctrain.worker.train.torch_trainer import TorchTrainer

STEPS, EPOCHS, STOP = 6, 2, 8
_BASE = {"model.layers": 2, "model.width": 32, "model.context": 24, "epochs": EPOCHS, "guard.every": 1}
CASES = {
    # 3 ranks have 5, 5 and 4 windows of a batch.
    "uneven": {"batch.size": 14, "data.epoch_samples": 14 * STEPS},
    "micro": {"batch.size": 14, "data.epoch_samples": 14 * STEPS, "batch.micro_batch": 2},
    "untied": {"batch.size": 12, "data.epoch_samples": 12 * STEPS, "model.tied": "false", "model.bias": "true"},
    "bf16": {"batch.size": 14, "data.epoch_samples": 14 * STEPS, "precision": "bf16"},
}


def recipe(case: str) -> Recipe:
    values = {"precision": "float32", **_BASE, **CASES[case]}
    small = smoke(load_recipe("gpt2-124m"))
    from hpctrain.common.recipes.load import override_recipe

    return override_recipe(small, [f"{key}={value}" for key, value in values.items()])


def reference(case: str) -> tuple[list[np.ndarray], list[float], float]:
    """Plain PyTorch in one process: parameters, the loss of each step, and the validation loss at the end."""
    settings = recipe(case)
    train, val = open_sources(settings)
    torch.manual_seed(settings.seed)
    model = GPT(settings.model)
    matrices = [each for each in model.parameters() if each.dim() > 1]
    vectors = [each for each in model.parameters() if each.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    size, peak, total = settings.batch.size, settings.optimizer.learning_rate, EPOCHS * STEPS
    order = endless_order(len(train), seed=settings.seed, first=0, count=size * total)
    # Of a run of so few steps a part of the first.
    climb = settings.schedule.warmup_epochs * STEPS
    losses = []
    for step, samples in enumerate(train.stream(np.split(order, total), 0)):
        share = (1 + math.cos(math.pi * (step - climb) / (total - climb))) / 2
        rate = peak / 10 + (peak - peak / 10) * share if step else settings.schedule.warmup_from
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        logits = model(torch.from_numpy(samples.images))
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), torch.from_numpy(samples.labels))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    (whole,) = val.stream([np.arange(len(val))], 0)
    with torch.no_grad():
        logits = model(torch.from_numpy(whole.images)).transpose(1, 2)
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(whole.labels)).item()
    return [each.detach().numpy() for each in model.parameters()], losses, loss


def train(case: str, comm: Communicator, output: str, *, resumed: bool = False) -> np.ndarray:
    """The parameters after the run, which ``resumed`` is stopped once."""
    name = f"{case}-resumed" if resumed else case
    settings = recipe(case)
    begun, done = 0, False
    while not done:
        trainer = TorchTrainer(settings, comm)
        with EventWriter(Path(f"{output}-{name}.jsonl") if comm.rank == 0 else None) as events:
            loop = Loop(
                settings,
                comm,
                trainer,
                *open_sources(settings),
                events,
                checkpoints=Checkpoints(Path(f"{output}-{name}"), comm, events),
                dumps=Path(f"{output}-{name}-dumps"),
                asked=lambda: "to try it" if resumed and not begun and loop.iteration >= STOP - 1 else None,  # noqa: B023
            )
            done = loop.run(begun)
        begun = loop.iteration
    return np.concatenate([each.detach().numpy().ravel() for each in trainer.model.parameters()])


def main(output: str) -> None:
    comm = ht.init()
    results = {case: train(case, comm, output) for case in CASES}
    results |= {f"{case}-resumed": train(case, comm, output, resumed=True) for case in ("micro", "untied")}
    np.savez(f"{output}-{comm.rank}.npz", **results)


if __name__ == "__main__":
    main(sys.argv[1])

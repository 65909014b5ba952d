"""Recipes of a small GPT, and what a loop of plain PyTorch in one process makes of them."""

from __future__ import annotations

import math

import numpy as np
import torch

from hpctrain.common.recipes.load import load_recipe, override_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.smoke import smoke
from hpctrain.worker.data import open_sources
from hpctrain.worker.data.sampling import endless_order
from hpctrain.worker.models.torch_gpt import GPT

STEPS, EPOCHS = 6, 2
_BASE = {"model.layers": 2, "model.width": 32, "model.context": 24, "epochs": EPOCHS, "guard.every": 1}
CASES = {
    # 3 ranks have 5, 5 and 4 windows of a batch.
    "uneven": {"batch.size": 14, "data.epoch_samples": 14 * STEPS},
    "micro": {"batch.size": 14, "data.epoch_samples": 14 * STEPS, "batch.micro_batch": 2},
    "untied": {"batch.size": 12, "data.epoch_samples": 12 * STEPS, "model.tied": "false", "model.bias": "true"},
    "bf16": {"batch.size": 14, "data.epoch_samples": 14 * STEPS, "precision": "bf16"},
}


def recipe(case: str, *changes: str) -> Recipe:
    values = {"precision": "float32", **_BASE, **CASES[case]}
    settings = [f"{key}={value}" for key, value in values.items()]
    return override_recipe(smoke(load_recipe("gpt2-124m")), [*settings, *changes])


def reference(case: str, *changes: str) -> tuple[list[np.ndarray], list[float], float]:
    """Plain PyTorch in one process: parameters, the loss of each step, and the validation loss at the end."""
    settings = recipe(case, *changes)
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

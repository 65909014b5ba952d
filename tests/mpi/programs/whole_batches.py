"""Small programs as people write them, many in one job: what each computes, as numbers or the code of its refusal."""

from __future__ import annotations

import importlib
import json
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpctrain as ht

FEATURES, CLASSES = 6, 5
# Neither a batch nor the data set is divisible by 2 or 3, and the last batch is smaller than three ranks.
SAMPLES, BATCH = 41, 13

Numbers = list[Any]
CASES: dict[str, Callable[[], Numbers]] = {}


def case(function: Callable[[], Numbers]) -> Callable[[], Numbers]:
    """Take a program into the pool: it returns numbers, and models and tensors, which stand for their values."""
    assert function.__name__ not in CASES
    CASES[function.__name__] = function
    return function


def samples(*shape: int, number: int = SAMPLES, seed: int = 5) -> torch.Tensor:
    """Features of samples."""
    return torch.randn(number, *(shape or (FEATURES,)), generator=torch.Generator().manual_seed(seed))


def labels(classes: int = CLASSES, *shape: int, number: int = SAMPLES, seed: int = 6) -> torch.Tensor:
    """Integers below a number of classes."""
    return torch.randint(0, classes, (number, *shape), generator=torch.Generator().manual_seed(seed))


def batches(*tensors: torch.Tensor, batch: int = BATCH, **settings: Any) -> Any:
    """A sharded loader of tensors; of features and labels, if there are none."""
    return ht.shard(DataLoader(TensorDataset(*(tensors or (samples(), labels()))), batch_size=batch, **settings))


def network(inputs: int = FEATURES, outputs: int = CLASSES, hidden: int = 8) -> nn.Sequential:
    """A small network."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def trained(
    model: nn.Module, loss_of: Callable[..., torch.Tensor], loader: Any = None, *, rate: float = 0.1
) -> Numbers:
    """Train a model with a loss: each step's loss, and the model."""
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5))
    return [step(optimizer, loss_of(model, *batch)) for batch in loader or batches()] + [model]


def step(optimizer: Any, loss: torch.Tensor) -> float:
    """An update; the loss as a number."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def values(result: Any) -> list[float]:
    """Plain numbers that stand for a model, a tensor or a number."""
    if isinstance(result, nn.Module):
        return [each for parameter in result.parameters() for each in values(parameter)]
    if not isinstance(result, torch.Tensor):
        return [float(result)]
    flat = torch.view_as_real(result.detach()) if result.is_complex() else result.detach()
    flat = flat.double().reshape(-1)
    return [(flat * torch.cos(torch.arange(flat.numel()) + 1.0)).sum().item()]


def run(name: str) -> dict[str, Any]:
    """What a program computes."""
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    torch.set_default_dtype(torch.float64)
    begin = time.monotonic()
    try:
        found = {"values": [each for result in CASES[name]() for each in values(result)], "refused": ""}
    except Exception as error:
        found = {"values": [], "refused": getattr(error, "code", repr(error)), "trace": traceback.format_exc()}
    return {**found, "seconds": time.monotonic() - begin}


def main(out: str, *names: str) -> None:
    comm = ht.init()
    for pool in ("whole_batch_losses", "whole_batch_models", "whole_batch_loops", "whole_batch_traces"):
        importlib.import_module(pool)
    results = {}
    for name in names or sorted(CASES):
        results[name] = run(name)
        Path(f"{out}-{comm.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    sys.modules["whole_batches"] = sys.modules["__main__"]
    main(*sys.argv[1:])

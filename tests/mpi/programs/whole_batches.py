"""Small programs as people write them, many in one job: what each computes, as numbers or the code of its refusal.

``python whole_batches.py OUT POOL,… [NAME …]`` writes OUT-RANK.json; pools are the modules beside this one. With
``MESH=dp_shard=-1,zero=1,units`` in the environment the models are divided over that mesh; with ``units`` each linear
layer is gathered by itself.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
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
from torch.autograd import backward as BACKWARD
from torch.utils.data import DataLoader, TensorDataset

import hpctrain as ht
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.worker.adapters.data_ranks import set_mesh
from hpctrain.worker.adapters.torch.parallel.division import of_divided_tensors

FEATURES, CLASSES = 6, 5
# Neither a batch nor the data set is divisible by 2 or 3, and the last batch is smaller than three ranks.
SAMPLES, BATCH = 41, 13

# Imported ahead of hpctrain: see backward_imported_before.
__all__ = ["BACKWARD"]
Numbers = list[Any]
CASES: dict[str, Callable[[], Numbers]] = {}


def case(function: Callable[[], Numbers]) -> Callable[[], Numbers]:
    """Take a program into the pool: it returns numbers, and models and tensors, which stand for their values."""
    assert function.__name__ not in CASES
    CASES[function.__name__] = function
    return function


def samples(*shape: int, number: int = SAMPLES, seed: int = 5) -> torch.Tensor:
    """Features of samples."""
    drawn = torch.randn(
        number, *(shape or (FEATURES,)), generator=torch.Generator("cpu").manual_seed(seed), device="cpu"
    )
    return drawn.to(torch.get_default_device())


def labels(classes: int = CLASSES, *shape: int, number: int = SAMPLES, seed: int = 6) -> torch.Tensor:
    """Integers below a number of classes."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(0, classes, (number, *shape), generator=generator, device="cpu").to(torch.get_default_device())


def batches(*tensors: torch.Tensor, batch: int = BATCH, **settings: Any) -> Any:
    """A sharded loader of tensors; of features and labels, if there are none."""
    return ht.shard(DataLoader(TensorDataset(*(tensors or (samples(), labels()))), batch_size=batch, **settings))


def network(inputs: int = FEATURES, outputs: int = CLASSES, hidden: int = 8) -> nn.Sequential:
    """A small network."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def distributed(
    model: nn.Module, kind: Callable[..., Any] = torch.optim.SGD, rate: float = 0.1, **settings: Any
) -> tuple[nn.Module, Any]:
    """A model and its new optimizer, distributed."""
    return ht.distribute(model, kind(model.parameters(), lr=rate, **settings))


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
    """Plain numbers that stand for a model, a pipeline, a tensor or a number."""
    if isinstance(result, ht.Pipeline):
        own = {name: values(parameter) for name, parameter in result.named_parameters()}
        everyone = {name: each for theirs in ht.init().allgather_object(own) for name, each in theirs.items()}
        return [each for _, numbers in sorted(everyone.items()) for each in numbers]
    if isinstance(result, nn.Module):
        return [each for _, parameter in sorted(result.named_parameters()) for each in values(parameter)]
    if not isinstance(result, torch.Tensor):
        return [float(result)]
    flat = (result.full_tensor() if hasattr(result, "full_tensor") else result).detach()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).double().reshape(-1)
    return [(flat * torch.cos(torch.arange(flat.numel()) + 1.0)).sum().item()]


def divide_by(text: str) -> None:
    """Let ``ht.distribute`` divide each model for which a program chooses no mesh by itself."""
    settings = dict(part.partition("=")[::2] for part in text.split(","))
    zero = int(settings.pop("zero", 3))
    sizes = {axis: int(size) for axis, size in settings.items() if size}
    plain = ht.distribute

    @functools.wraps(plain)
    def distribute(model: nn.Module, optimizer: Any, **more: Any) -> Any:
        if "mesh" not in more:
            kind = getattr(model, "unit", nn.Linear)
            has_units = "units" in settings and any(isinstance(each, kind) for each in list(model.modules())[1:])
            plan = ht.ParallelPlan(shard=[kind] if has_units else [], zero=zero)
            more = {"mesh": ht.mesh(**sizes), "plan": plan, **more}
        return plain(model, optimizer, **more)

    ht.distribute = distribute


def run(name: str) -> dict[str, Any]:
    """What a program computes."""
    gc.collect()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    torch.set_default_dtype(torch.float64)
    begin = time.monotonic()
    try:
        found = {"values": [each for result in CASES[name]() for each in values(result)], "refused": ""}
    except Exception as error:
        explained = "explained" if of_divided_tensors(error) else repr(error)
        found = {"values": [], "refused": getattr(error, "code", explained), "trace": traceback.format_exc()}
    return {**found, "seconds": time.monotonic() - begin}


def programs(*pools: str) -> dict[str, Callable[[], Numbers]]:
    """The programs of these modules."""
    for pool in pools:
        importlib.import_module(f"whole_batch_{pool}")
    return CASES


def main(out: str, pools: str, *names: str) -> None:
    comm, mesh = ht.init(), os.environ.get("MESH", "")
    programs(*pools.split(","))
    if mesh:
        divide_by(mesh)
    results = {}
    for name in names or sorted(CASES):
        if not mesh:
            set_mesh(comm, Mesh())
        results[name] = run(name)
        Path(f"{out}-{comm.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    sys.modules["whole_batches"] = sys.modules["__main__"]
    main(*sys.argv[1:])

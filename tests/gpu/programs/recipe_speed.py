"""A recipe's steps in turn with a plain loop over the same network, in one process: ``recipe_speed.py OUT.json '{…}'``.

The recipe's step is that of its trainer, without the loop around it. A plain loop is compiled, has its batch on the
device, and computes in bfloat16 too. ``variants`` are settings of the recipe, and names of other decisions within its
step, that are measured beside them.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch._dynamo.utils import counters

import hpctrain as ht
from hpctrain.common.recipes import loss_chunks
from hpctrain.common.recipes.load import load_recipe, override_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.directory import write_json
from hpctrain.worker import models
from hpctrain.worker.bench.in_turn import rotated
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.train import torch_compile
from hpctrain.worker.train.feed import SamplesAhead
from hpctrain.worker.train.torch_trainer import TorchTrainer

Call = Callable[[], object]

_WARM_UP = 3
# What another decision would make of a recipe's step: a trainer is made, and its steps are taken, within such a change.
VARIANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "chunks of 2**25 logits": lambda: mock.patch.multiple(loss_chunks, _LOGITS_ON_GPU=2**25, _MOST_CHUNKS=128),
    "chunks of 2**29 logits": lambda: mock.patch.object(loss_chunks, "_LOGITS_ON_GPU", 2**29),
    # As for several ranks, which reduce the gradients of a block while those of the others are computed.
    "each block by itself": lambda: mock.patch.object(torch_compile, "compiles_whole", lambda *_: False),
}


def samples(recipe: Recipe, count: int) -> Samples:
    """Random images, or random tokens."""
    random = np.random.default_rng(0)
    if recipe.data.name == "text":
        tokens = random.integers(recipe.model.vocabulary, size=(count, recipe.model.context + 1))
        return Samples(images=tokens[:, :-1].copy(), labels=tokens[:, 1:].copy())
    size = recipe.images.size
    return Samples(
        images=random.integers(256, size=(count, size, size, 3), dtype=np.uint8),
        labels=random.integers(1000, size=count),
    )


def steps_ahead(trainer: TorchTrainer, recipe: Recipe, parts: list[Samples]) -> Call:
    """A step on these parts of a batch as the loop does it: the next are copied while the device computes."""
    ahead = SamplesAhead(itertools.cycle(parts), trainer.place)
    scale = 1 / recipe.global_batch

    def step() -> None:
        trainer.meanwhile = ahead.fetch
        trainer.step(itertools.islice(ahead, len(parts)), len(parts), scale, 1e-4, 0.0)
        trainer.meanwhile = lambda: None

    return step


def variant(name: str, recipe: Recipe, parts: list[Samples]) -> Call:
    """The recipe's step with one of :data:`VARIANTS`, or with a setting such as ``compile=graphs``."""
    change = VARIANTS.get(name, nullcontext)
    if name not in VARIANTS:
        recipe = override_recipe(recipe, [name])
    with change():
        step = steps_ahead(TorchTrainer(recipe, ht.init("single")), recipe, parts)

    def run() -> None:
        with change():
            step()

    return run


def waits(call: Call) -> int | None:
    """How often a call waits for the GPU, as PyTorch sees it; None without one."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(each.message) for each in told)


def plain(recipe: Recipe, parts: list[Samples], device: torch.device, *, compiled: bool) -> Call:
    """A loop as anybody writes it."""
    torch.manual_seed(0)
    model = models.build(recipe.model, "torch", ht.init("single"), at_once=len(parts[0])).to(device)
    text = recipe.data.name == "text"
    if text:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
        )
        kept = [tuple(torch.from_numpy(each).to(device) for each in (part.images, part.labels)) for part in parts]
    else:
        model = model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True, weight_decay=1e-4)
        kept = [
            (torch.from_numpy(part.images).to(device).permute(0, 3, 1, 2), torch.from_numpy(part.labels).to(device))
            for part in parts
        ]
    forward = torch.compile(model) if compiled else model

    def run() -> None:
        optimizer.zero_grad()
        for x, y in kept:
            with torch.autocast(device.type, torch.bfloat16):
                logits = forward(x if text else (x.float() - 118) / 58)
                loss = nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten()) / len(kept)
            loss.backward()
        if text:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return run


def timed(calls: dict[str, Call], rounds: int, together: int) -> Iterator[dict[str, float]]:
    """The median seconds of a call of each alternative after each round; rounds alternate."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(_WARM_UP):
            call()
    for number in range(rounds):
        for name in rotated([*calls], number):
            _wait()
            began = time.perf_counter()
            for _ in range(together):
                calls[name]()
            _wait()
            found[name].append((time.perf_counter() - began) / together)
        yield {name: statistics.median(seconds) for name, seconds in found.items()}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(out: str, chosen: str) -> None:
    """Measure ``recipe`` with the changes ``set``, and its ``variants``: ``rounds`` of ``together`` steps each.

    What is known is written as it comes: a program that takes too long is ended.
    """
    options: dict[str, Any] = json.loads(chosen)
    recipe = load_recipe(options["recipe"], options["set"]).at(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = TorchTrainer(recipe, ht.init("single"))
    at_once = recipe.batch.at_once(1)
    parts = [samples(recipe, at_once) for _ in range(recipe.global_batch // at_once)]
    calls: dict[str, Call] = {"recipe": steps_ahead(trainer, recipe, parts)}
    for _ in range(_WARM_UP):
        calls["recipe"]()
    # Of the recipe by itself: nothing else is there yet.
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    found: dict[str, Any] = {"rates": {}, "peak_bytes": peak, "waits": waits(calls["recipe"])}
    write_json(Path(out), found)
    calls["plain"] = plain(recipe, parts, device, compiled=options["compile"])
    calls |= {name: variant(name, recipe, parts) for name in options["variants"]}
    each = recipe.model.context if recipe.data.name == "text" else 1
    for seconds in timed(calls, options["rounds"], options["together"]):
        found["rates"] = {name: recipe.global_batch * each / taken for name, taken in seconds.items()}
        # Which of compile=graphs are launched kernel by kernel all the same.
        found["graphs_left_out"] = counters["inductor"]["cudagraph_skips"]
        write_json(Path(out), found)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Times steps of a recipe whose model is ``gpt`` under meshes, on every rank, for benchmarks/this_machine.py.

``gpt_steps.py OUT.json RECIPE.json ROUNDS MESH[:KEY=VALUE…]…`` writes the seconds of each step of the slowest rank, by
the text of its case. The trainers are those of ``hpctrain run``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import hpctrain as ht
from hpctrain.common.recipes.load import mesh_overrides, override_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.worker.adapters.data_ranks import data_place, set_mesh
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.train.recipe import torch_trainer

# Of one case's timed steps; one of them at least.
_MOST_SECONDS = 4.0


def recipe_of(base: Recipe, case: str) -> Recipe:
    """The recipe of a case."""
    mesh, *changes = case.split(":")
    return override_recipe(base, [*mesh_overrides(mesh), *changes])


def step_of(recipe: Recipe, comm: Communicator) -> Callable[[], object]:
    """One step of a new trainer, on this rank's share of random tokens."""
    set_mesh(comm, recipe.mesh)
    trainer = torch_trainer(recipe, comm)(recipe, comm)
    place = data_place(comm)
    share, at_once = recipe.global_batch // place.ranks, recipe.batch.at_once(place.ranks)
    shape = share, recipe.model.context
    random = np.random.default_rng(place.rank)
    tokens, labels = (random.integers(0, recipe.model.vocabulary, shape) for _ in range(2))
    samples = Samples(images=tokens, labels=labels)
    parts = [samples[first : first + at_once] for first in range(0, share, at_once)]
    return lambda: trainer.step(iter(parts), len(parts), 1 / share, 1e-4, 1.0)


def timed(step: Callable[[], object], comm: Communicator, rounds: int) -> list[float]:
    """Seconds of each step on its slowest rank."""
    times = np.zeros(rounds)
    for number in range(rounds):
        comm.barrier()
        start = time.perf_counter()
        step()
        times[number] = time.perf_counter() - start
    return [float(each) for each in comm.allreduce(times, "max")]


def main(out: str, base: str, rounds: str, *cases: str) -> None:
    comm = ht.init()
    recipe = Recipe.model_validate_json(Path(base).read_text())
    seconds: dict[str, list[float]] = {}
    for case in cases:
        step = step_of(recipe_of(recipe, case), comm)
        # The optimizer's state and the engines' buffers appear in the first one.
        _, second = timed(step, comm, 2)
        seconds[case] = timed(step, comm, max(1, min(int(rounds), int(_MOST_SECONDS / second))))
    if comm.rank == 0:
        Path(out).write_text(json.dumps(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])

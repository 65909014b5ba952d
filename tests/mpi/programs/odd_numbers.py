"""Recipes whose numbers go wrong on one rank: a pixel that is no number, and a flipped bit in the memory of a rank.

Usage: odd_numbers.py FOLDER BACKEND FRAMEWORK... Writes FOLDER/FRAMEWORK-RANK.json, and the runs into FOLDER/FRAMEWORK.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import recipe_runs

import hpctrain as ht
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.events import EventWriter
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data import load_digits
from hpctrain.worker.data.samples import InMemory, Samples
from hpctrain.worker.data.sampling import epoch_order, share
from hpctrain.worker.train.checkpoint_saving import Checkpoints
from hpctrain.worker.train.loop import Loop

SIZE, SAMPLES = 6, 24
# The step whose batch has the bad sample, on the last rank; and the step after which a bit flips on that rank.
BAD_STEP, FLIPPED, EVERY = 3, 5, 3


def recipe(**values: Any) -> Recipe:
    optimizer = {"name": "sgd", "learning_rate": 0.05, "momentum": 0.9}
    return recipe_runs.recipe(
        **{"batch": {"size": SIZE}, "optimizer": optimizer, "guard": {"every": EVERY}, "seed": 0, **values}
    )


def bad_sample(ranks: int) -> int:
    """In the last rank's share of the batch."""
    batch = epoch_order(SAMPLES, seed=0, epoch=0)[(BAD_STEP - 1) * SIZE : BAD_STEP * SIZE]
    return int(share(batch, ranks - 1, ranks).indices[0])


def flip(trainer: Any) -> str:
    """One bit of the first parameter; returns its name."""
    if trainer.framework == "torch":
        name, parameter = next(iter(trainer.model.named_parameters()))
        parameter.data.numpy().reshape(-1).view(np.int32)[1] ^= 1 << 20
        return str(name)
    variable = trainer.model.trainable_variables[0]
    values = variable.value.numpy()
    values.reshape(-1).view(np.int32)[1] ^= 1 << 20
    variable.assign(values)
    return str(variable.path)


class Runs:
    """Of one framework, on this rank."""

    def __init__(self, folder: Path, framework: str, comm: Communicator) -> None:
        self.folder, self.framework, self.comm = folder, framework, comm
        train, test = load_digits(test_fraction=0.2, seed=0)
        images = train.images[:SAMPLES].copy()
        images[bad_sample(comm.size)] = np.nan
        self.train = InMemory(samples=Samples(images=images, labels=train.labels[:SAMPLES]))
        self.test = InMemory(samples=test[:6])

    def run(
        self,
        name: str,
        settings: Recipe,
        *,
        prepare: Callable[[Any], None] = lambda trainer: None,
    ) -> dict[str, Any]:
        comm, folder = self.comm, self.folder / name
        settings = settings.at(comm.size)
        trainer = recipe_runs.new_trainer(self.framework, settings, comm)
        prepare(trainer)
        if comm.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
        comm.barrier()
        refused = None
        with (
            EventWriter(folder / "events.jsonl" if comm.rank == 0 else None) as events,
            Checkpoints(folder / "checkpoints", comm, events) as saves,
        ):
            loop = Loop(settings, comm, trainer, self.train, self.test, events, checkpoints=saves)
            try:
                loop.run()
            except HpctrainError as error:
                refused = error.record()
        state = trainer.state()
        finite = all(bool(np.isfinite(value).all()) for each, value in state.items() if each.startswith("model."))
        digests = {each: hashlib.sha256(value.tobytes()).hexdigest() for each, value in state.items()}
        return {"refused": refused, "state": digests, "finite": finite, "iteration": loop.iteration}

    def flipped(self) -> dict[str, Any]:
        """A skipped step, and later a bit that flips on the last rank."""
        name = ""

        def prepare(trainer: Any) -> None:
            step = trainer.step

            def step_and_flip(*arguments: Any) -> float:
                nonlocal name
                loss = step(*arguments)
                if trainer.updates == FLIPPED and self.comm.rank == self.comm.size - 1:
                    name = flip(trainer)
                return float(loss)

            trainer.step = step_and_flip

        settings = recipe(numbers={"non_finite": "skip"}, epochs=4)
        return {**self.run("flipped", settings, prepare=prepare), "flipped": name}


def main(folder: str, backend: str, *work: str) -> None:
    comm = ht.init(backend)
    for framework, _, cases in (each.partition("=") for each in work):
        runs = Runs(Path(folder) / framework, framework, comm)
        results: dict[str, Any] = {"host": comm.host}
        for case in cases.split(","):
            results[case] = runs.run("stop", recipe()) if case == "stop" else getattr(runs, case)()
        (Path(folder) / f"{framework}-{comm.rank}.json").write_text(json.dumps(results))
    ht.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

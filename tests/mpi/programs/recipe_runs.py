"""Small recipes and their loop, as the programs of ranks train, stop and resume them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from situations import refusal

from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.events import EventWriter
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data import load_digits
from hpctrain.worker.data.samples import InMemory, Samples
from hpctrain.worker.train.checkpoint_saving import Checkpoints
from hpctrain.worker.train.loop import Loop

# 61 samples in batches of 20 end with a single one: four steps an epoch, and some ranks have no sample in the last.
EPOCHS, SIZE, SAMPLES = 2, 20, 61


def recipe(**values: object) -> Recipe:
    base = {
        "name": "test",
        "source": "none",
        "reported": [{"metric": "test_accuracy", "value": 1.0}],
        "model": {"name": "digits_cnn"},
        "data": {"name": "digits"},
        "batch": {"size": SIZE},
        "epochs": EPOCHS,
        "seed": 3,
    }
    return Recipe.model_validate_json(json.dumps({**base, **values}))


def data() -> tuple[Samples, Samples]:
    train, test = load_digits(test_fraction=0.2, seed=3)
    return train[:SAMPLES], test[:50]


def new_trainer(framework: str, settings: Recipe, comm: Communicator) -> Any:
    if framework == "keras":
        # No import of Keras itself: by those of a program it is decided which framework its ranks begin with.
        from hpctrain.worker.train import keras_trainer

        # Checkpoints have layers by their names, which are those of the first model of a process.
        keras_trainer.keras.utils.clear_session()
        return keras_trainer.KerasTrainer(settings, comm)
    from hpctrain.worker.train.torch_trainer import TorchTrainer

    return TorchTrainer(settings, comm)


def parameters(trainer: Any) -> np.ndarray:
    """Those of both frameworks as PyTorch has them."""
    if trainer.framework == "torch":
        return np.concatenate([each.detach().numpy().ravel() for each in trainer.model.parameters()])
    from hpctrain.worker.models.convert import state_of

    return np.concatenate([value.ravel() for value in state_of(trainer.model).values()])


def train(
    case: str,
    settings: Recipe,
    comm: Communicator,
    trainer: Any,
    output: str,
    *,
    samples: Samples | None = None,
    sources: Any = None,
    stop_at: int | None = None,
    resume_from: int = 0,
    kind: Callable[..., Any] = Loop,
    begin: Callable[[Any], None] = lambda loop: None,
) -> Any:
    """Train to the end, or until a step; rank 0 writes the events to OUTPUT-CASE.jsonl. Returns the loop.

    Args:
        samples: to train on, in place of the digits.
        sources: both, in place of the digits.
        begin: gets the loop before it begins.
    """
    given, test = sources or [InMemory(samples=each) for each in data()]
    folder = f"{output}-{case}"
    with EventWriter(Path(f"{folder}.jsonl") if comm.rank == 0 else None) as events:
        loop = kind(
            settings,
            comm,
            trainer,
            InMemory(samples=samples) if samples else given,
            test,
            events,
            checkpoints=Checkpoints(Path(folder), comm, events),
            asked=lambda: "told to" if stop_at is not None and loop.iteration >= stop_at else None,
        )
        begin(loop)
        loop.run(resume_from)
    return loop


def told(work: Callable[[], object]) -> np.ndarray:
    """The record of an error, as an array."""
    return np.array(json.dumps(refusal(work)))

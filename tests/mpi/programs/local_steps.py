"""Ranks that make steps by themselves: parameters after each case, for test_local_steps.py to compare.

Usage: local_steps.py FRAMEWORK OUTPUT, which gets ``OUTPUT-RANK.npz`` and rank 0's ``OUTPUT-CASE.jsonl``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from situations import refusal

import hpctrain as ht
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.events import EventWriter
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data import load_digits
from hpctrain.worker.data.samples import InMemory, Samples
from hpctrain.worker.data.sampling import epoch_order
from hpctrain.worker.train.checkpoint import Checkpoints
from hpctrain.worker.train.loop import Loop
from hpctrain.worker.train.trainer import Trainer

EPOCHS, SIZE, SAMPLES = 2, 20, 61
SGD = {"name": "sgd", "learning_rate": 0.05}
MOMENTUM = {**SGD, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}
# With the usual epsilon, gradients that are almost zero decide the result by their last bits.
ADAMW = {"name": "adamw", "learning_rate": 2e-3, "weight_decay": 0.1, "epsilon": 1e-3}
OUTER = {"optimizer": "nesterov", "learning_rate": 0.7, "momentum": 0.9}
# 61 samples in batches of 20 end with a single one: four steps an epoch, and some ranks have no sample in the last.
CASES: dict[str, dict[str, object]] = {
    "every step": {"optimizer": SGD, "sync": {"every": 1}},
    "local": {"optimizer": MOMENTUM, "sync": {"every": 3}},
    "parts": {"optimizer": MOMENTUM, "sync": {"every": 3}, "batch": {"size": SIZE, "micro_batch": 4}},
    "post-local": {"optimizer": MOMENTUM, "sync": {"every": 2, "after_epochs": 1}},
    "diloco": {"optimizer": ADAMW, "sync": {"every": 2, "outer": OUTER}, "guard": {"every": 3}},
    "clipped": {"optimizer": {**SGD, "clip_norm": 0.5}, "sync": {"every": 4}},
}


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


def new_trainer(framework: str, settings: Recipe, comm: Communicator) -> Trainer:
    if framework == "keras":
        import keras

        from hpctrain.worker.train.keras_trainer import KerasTrainer

        # Checkpoints have layers by their names, which are those of the first model of a process.
        keras.utils.clear_session()
        return KerasTrainer(settings, comm)
    from hpctrain.worker.train.torch_trainer import TorchTrainer

    return TorchTrainer(settings, comm)


def parameters(trainer: Trainer) -> np.ndarray:
    """Those of both frameworks as PyTorch has them."""
    if trainer.framework == "torch":
        return np.concatenate([each.detach().numpy().ravel() for each in trainer.model.parameters()])
    from hpctrain.worker.models.convert import state_of

    return np.concatenate([value.ravel() for value in state_of(trainer.model).values()])


def train(
    case: str,
    settings: Recipe,
    comm: Communicator,
    trainer: Trainer,
    output: str,
    *,
    samples: Samples | None = None,
    stop_at: int | None = None,
    resume_from: int = 0,
) -> Loop:
    given, test = data()
    events = Path(f"{output}-{case}.jsonl") if comm.rank == 0 else None
    with EventWriter(events) as writer:
        loop = Loop(
            settings,
            comm,
            trainer,
            InMemory(samples=samples or given),
            InMemory(samples=test),
            writer,
            checkpoints=Checkpoints(Path(f"{output}-{case}"), comm, writer),
            dumps=Path(f"{output}-{case}-dumps"),
            asked=lambda: "told to" if stop_at and loop.iteration >= stop_at else None,
        )
        loop.run(resume_from)
    return loop


def told(work: Callable[[], object]) -> np.ndarray:
    """The record of an error, as an array."""
    return np.array(json.dumps(refusal(work)))


def interrupted(framework: str, comm: Communicator, output: str) -> dict[str, np.ndarray]:
    """DiLoCo, asked to stop after its first step, which it does after its second; then gone on with by new trainers."""
    settings = recipe(**CASES["diloco"])
    first = train("stopped", settings, comm, new_trainer(framework, settings, comm), output, stop_at=1)
    trainer = new_trainer(framework, settings, comm)
    train("stopped", settings, comm, trainer, output, resume_from=first.iteration)
    return {"resumed": parameters(trainer), "stopped after": np.array(first.iteration)}


def faulty(framework: str, comm: Communicator, output: str) -> dict[str, np.ndarray]:
    """A sample that is not a number, in the second step, of a round of three; and parameters that differ after one."""
    settings = recipe(**CASES["local"])
    samples, _ = data()
    images = samples.images.copy()
    images[epoch_order(SAMPLES, seed=3, epoch=0)[SIZE]] = np.nan
    broken = Samples(images=images, labels=samples.labels)
    found = told(
        lambda: train("faulty", settings, comm, new_trainer(framework, settings, comm), output, samples=broken)
    )
    trainer = new_trainer(framework, settings, comm)
    trainer.alone = trainer.guard.apart = True
    trainer.step([samples[np.arange(5) + comm.rank]], 1, 0.1, 0.05, 1.0)
    trainer.average_parameters()
    if comm.rank == comm.size - 1:
        spoil(trainer)
    return {"non-finite": found, "differ": told(trainer.guard.averaged)}


def spoil(trainer: Trainer) -> None:
    if trainer.framework == "torch":
        next(trainer.model.parameters()).data.view(-1)[0] += 1
    else:
        variable = trainer.model.trainable_variables[0]
        variable.assign(variable.value + 1)


def main(framework: str, output: str) -> None:
    comm = ht.init()
    results = {}
    for case, values in CASES.items():
        trainer = new_trainer(framework, recipe(**values), comm)
        results[f"{case} begun"] = parameters(trainer)
        train(case, recipe(**values), comm, trainer, output)
        results[case] = parameters(trainer)
    results |= interrupted(framework, comm, output) | faulty(framework, comm, output)
    np.savez(f"{output}-{comm.rank}.npz", **results)


if __name__ == "__main__":
    main(*sys.argv[1:])

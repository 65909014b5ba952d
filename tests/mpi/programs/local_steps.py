"""Ranks that make steps by themselves: parameters after each case, for test_local_steps.py to compare.

Usage: local_steps.py FRAMEWORK OUTPUT, which gets ``OUTPUT-RANK.npz`` and rank 0's ``OUTPUT-CASE.jsonl``.
"""

from __future__ import annotations

import sys

import numpy as np
from recipe_runs import EPOCHS, SAMPLES, SIZE, data, new_trainer, parameters, recipe, told, train

import hpctrain as ht
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.data.sampling import epoch_order
from hpctrain.worker.train.trainer import Trainer

__all__ = ["EPOCHS", "data", "recipe"]

SGD = {"name": "sgd", "learning_rate": 0.05}
MOMENTUM = {**SGD, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}
# With the usual epsilon, gradients that are almost zero decide the result by their last bits.
ADAMW = {"name": "adamw", "learning_rate": 2e-3, "weight_decay": 0.1, "epsilon": 1e-3}
OUTER = {"optimizer": "nesterov", "learning_rate": 0.7, "momentum": 0.9}
CASES: dict[str, dict[str, object]] = {
    "every step": {"optimizer": SGD, "sync": {"every": 1}},
    "local": {"optimizer": MOMENTUM, "sync": {"every": 3}},
    "parts": {"optimizer": MOMENTUM, "sync": {"every": 3}, "batch": {"size": SIZE, "micro_batch": 4}},
    "post-local": {"optimizer": MOMENTUM, "sync": {"every": 2, "after_epochs": 1}},
    "post-local diloco": {"optimizer": MOMENTUM, "sync": {"every": 2, "after_epochs": 1, "outer": OUTER}},
    "diloco": {"optimizer": ADAMW, "sync": {"every": 2, "outer": OUTER}, "guard": {"every": 3}},
    "clipped": {"optimizer": {**SGD, "clip_norm": 0.5}, "sync": {"every": 4}},
}


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
    trainer.outer.step()
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

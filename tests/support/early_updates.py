"""Trainers that give updates to their device before or after the host knows whether gradients are finite."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctrain.worker.data.samples import Samples
from hpctrain.worker.train.torch_copies import ImageCopies
from hpctrain.worker.train.torch_trainer import TorchTrainer

STEPS = 6
MOMENTUM = {"momentum": 0.9, "weight_decay": 1e-3}
INSIDE = {**MOMENTUM, "rate_in_momentum": True}
TRANSITION = {"center": 1.0, "period": 1.0, "rmsprop_rate": 0.005}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "learning_rate": 0.02, **MOMENTUM, "nesterov": True, "clip_norm": 1.0},
    "sgd, decoupled": {"name": "sgd", "learning_rate": 0.02, **INSIDE, "decoupled_decay": True},
    "adam": {"name": "adam", "learning_rate": 1e-3},
    "adamw": {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1, "clip_norm": 1.0},
    "lars": {"name": "lars", "learning_rate": 0.5, **INSIDE, "trust_coefficient": 0.02, "unadapted": ["bias"]},
    "lars, nesterov": {"name": "lars", "learning_rate": 0.5, **INSIDE, "trust_coefficient": 0.02, "nesterov": True},
    "rmsprop": {"name": "rmsprop_to_sgd", "learning_rate": 0.02, **MOMENTUM, "transition": TRANSITION},
    "lamb": {"name": "lamb", "learning_rate": 0.01, "weight_decay": 0.01, "unadapted": ["bias"], "clip_norm": 1.0},
}
AVERAGED = {"averaging": {"decay": 0.8}}


class Late(TorchTrainer):
    """As on a CPU."""

    def _updates_early(self) -> bool:
        return False


class Early(TorchTrainer):
    """As on a GPU. Notes the steps whose update came before the reading."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # Samples are taken ahead too.
        self._copies = self._copies or ImageCopies(self._device)
        self.early: list[int] = []

    def _updates_early(self) -> bool:
        return True

    def _update(self) -> None:
        if self._unread is not None:
            self.early.append(self.updates)
        super()._update()


def step(trainer: TorchTrainer, number: int, bad: float | None) -> tuple[Any, ...]:
    """A step of two parts, of which the second has a sample with a bad pixel; what the host knows after it."""
    random = np.random.default_rng(number)
    parts = [
        Samples(images=random.random((4, 8, 8, 1), np.float32), labels=random.integers(0, 10, 4)) for _ in range(2)
    ]
    if bad is not None:
        parts[1].images[1, 2, 3] = bad
    rate = trainer._optimizer.param_groups[0]["lr"]
    loss = trainer.step(parts, 2, 1 / 8, rate, number / STEPS, 0.2 if trainer._average else None)
    return (
        *map(repr, (loss, trainer.loss, trainer.gradient_numbers())),
        *(trainer.updates, trainer.faulty, trainer.own_finite, trainer.guard.steps),
    )

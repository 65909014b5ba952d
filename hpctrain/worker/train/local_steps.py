"""Local steps: each rank trains by itself between the steps after which all ranks have the same parameters again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.sync import Outer
from hpctrain.worker.comm import Communicator

if TYPE_CHECKING:
    from hpctrain.worker.train.trainer import Trainer

_VELOCITY = "outer.velocity"


class LocalSteps:
    """When the ranks of a run meet: after each step, or as a recipe's ``sync`` of the mode local says.

    Args:
        recipe: without ``sync`` the ranks meet after each step.
    """

    def __init__(self, recipe: Recipe, comm: Communicator, trainer: Trainer) -> None:
        self._sync = recipe.sync
        self._comm = comm
        self._trainer = trainer
        self._losses: list[float] = []

    @property
    def synchronised(self) -> bool:
        """Whether all ranks have the same parameters."""
        return not self._trainer.guard.apart

    def begin(self, epochs: float) -> None:
        """Begin a step after ``epochs`` epochs of the run."""
        alone = self._sync is not None and epochs >= self._sync.after_epochs
        if alone and not self._trainer.alone and self._trainer.outer:
            self._trainer.outer.begin()
        self._trainer.alone = self._trainer.guard.apart = alone

    def end(self, own_loss: float, *, last: bool) -> bool:
        """End a step, the last of its epoch or not; returns whether the ranks meet now. Collective then."""
        self._losses.append(own_loss)
        sync = self._sync
        together = not self._trainer.alone or last or sync is None or len(self._losses) >= sync.every
        if self._trainer.alone and together and self._trainer.outer:
            self._trainer.outer.step()
            self._trainer.guard.averaged()
        return together

    def average(self, values: Sequence[float]) -> tuple[list[float], list[float]]:
        """Average over the ranks where they meet. Collective.

        Returns:
            The mean loss of each step since the ranks last synchronised, and the mean of each of ``values``.
        """
        losses, self._losses = self._losses, []
        means = self._comm.allreduce(np.array([*losses, *values], np.float64), "mean").tolist()
        return means[: len(losses)], means[len(losses) :]


class OuterStep:
    """Replaces parameters, equal on all ranks before the ranks' own steps, by what a recipe makes of their mean.

    Attributes:
        state: the outer optimizer's momentum by name in a checkpoint, in the parameters' order.
    """

    def __init__(self, trainer: Trainer, outer: Outer) -> None:
        self._trainer = trainer
        self._outer = outer if outer.optimizer == "nesterov" else None
        self.state = {_VELOCITY: np.zeros_like(trainer.vector())} if self._outer else {}

    def begin(self) -> None:
        """Take the parameters as those before the ranks' own steps."""
        if self._outer:
            self._before = self._trainer.vector()

    def step(self) -> None:
        """Average over the ranks. Collective.

        With Nesterov's momentum (Douillard et al. 2023, algorithm 1; as torch.optim.SGD defines it) the gradient is
        g = before - mean: v = m v + g, and the parameters are before - rate (g + m v).
        """
        mean = self._trainer.mean_vector()
        if self._outer:
            gradient, velocity = self._before - mean, self.state[_VELOCITY]
            velocity *= np.float32(self._outer.momentum)
            velocity += gradient
            self._before -= np.float32(self._outer.learning_rate) * (
                gradient + np.float32(self._outer.momentum) * velocity
            )
            mean = self._before
        self._trainer.set_vector(mean)

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a checkpoint whose parameters were already restored."""
        for name, array in self.state.items():
            array[:] = state[name]
        self.begin()

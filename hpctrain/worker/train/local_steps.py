"""Steps that each rank makes by itself, between those after which all ranks have the same parameters again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.common.recipes.schema import Recipe
from hpctrain.worker.comm import Communicator
from hpctrain.worker.train.trainer import Trainer

# Parameters and their gradients are float32.
_ITEM_BYTES = 4


class LocalSteps:
    """When the ranks of a run meet: after each step, or as a recipe's ``sync`` of the mode local says.

    Args:
        recipe: without ``sync`` they meet after each step.
        comm: the ranks.
        trainer: of this rank.

    Attributes:
        bytes: what this rank gave to reductions in the last step, before they are compressed; None where it did not
            give gradients or parameters whole.
    """

    def __init__(self, recipe: Recipe, comm: Communicator, trainer: Trainer) -> None:
        self._sync = recipe.sync
        self._comm = comm
        self._trainer = trainer
        self._losses: list[float] = []
        # On a mesh that divides the parameters, and by a strategy of TensorFlow's, the framework moves what it needs.
        self._whole = recipe.mesh.replicates_only and comm.strategy is None
        self.bytes: int | None = 0 if self._whole else None

    @property
    def met(self) -> bool:
        """Whether all ranks have the same parameters."""
        return not self._trainer.guard.apart

    def begin(self, epochs: float) -> None:
        """Begin a step, after so many epochs of the run."""
        alone = self._sync is not None and epochs >= self._sync.after_epochs
        self._trainer.alone = self._trainer.guard.apart = alone

    def end(self, own_loss: float, *, last: bool) -> bool:
        """End a step, the last of its epoch or not; returns whether the ranks meet now. Collective then."""
        self._losses.append(own_loss)
        sync = self._sync
        together = not self._trainer.alone or last or sync is None or len(self._losses) >= sync.every
        if self._trainer.alone and together:
            self._trainer.average_parameters()
            self._trainer.guard.averaged()
        if self._whole:
            self.bytes = _ITEM_BYTES * self._trainer.parameters if together and self._comm.size > 1 else 0
        return together

    def tell(self, words: Sequence[float]) -> tuple[list[float], list[float]]:
        """Exchange, where the ranks meet, what happened since they last did. Collective.

        Returns:
            The mean over the ranks of each step's loss, and of each of the words.
        """
        losses, self._losses = self._losses, []
        means = self._comm.allreduce(np.array([*losses, *words], np.float64), "mean").tolist()
        return means[: len(losses)], means[len(losses) :]

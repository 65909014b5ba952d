"""The learning rate over a run, as a function of the iteration."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from hpctrain.recipes.schema import Schedule, Transition


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear scaling, gradual warm-up, then the schedule's decay (Goyal et al. 2017, arXiv 1706.02677, section 2).

    Attributes:
        schedule: the recipe's.
        learning_rate: the base rate, for ``schedule.base_batch`` samples a step.
        batch_size: samples of one step over all ranks.
        iterations_per_epoch: steps of one epoch.
        epochs: epochs of the run.
    """

    schedule: Schedule
    learning_rate: float
    batch_size: int
    iterations_per_epoch: int
    epochs: int

    @property
    def peak(self) -> float:
        """The scaled rate, reached at the end of the warm-up."""
        return self.learning_rate * self.batch_size / (self.schedule.base_batch or self.batch_size)

    def __call__(self, iteration: float) -> float:
        """The rate of the step after ``iteration`` steps; at the number of all steps, the rate the run ends at.

        A part of a step is one of ``batch_size`` samples.
        """
        epoch = iteration / self.iterations_per_epoch
        warmup = self.schedule.warmup_epochs
        if epoch < warmup:
            return self.learning_rate + (self.peak - self.learning_rate) * epoch / warmup
        return self.peak * self._decay(epoch)

    def _decay(self, epoch: float) -> float:
        match self.schedule.name:
            case "constant":
                return 1.0
            case "step":
                return self.schedule.gamma ** bisect_right(self.schedule.milestones, epoch)
            case "cosine":
                span = self.epochs - self.schedule.warmup_epochs
                done = (epoch - self.schedule.warmup_epochs) / span if span else 0.0
                return (1 + math.cos(math.pi * done)) / 2
            case _:
                raise NotImplementedError


def sgd_share(epoch: float, transition: Transition) -> float:
    """SGD's part in the update of rmsprop_to_sgd, 0 to 1 (Akiba et al. 2017, arXiv 1711.04325, section 3.1).

    Exponential up to one half at ``transition.center``, then linear with the same slope up to 1 at
    ``transition.period / 2`` epochs behind it. RMSprop's part is what is left, times ``transition.rmsprop_rate``.
    """
    periods = (epoch - transition.center) / transition.period
    return math.exp(2 * periods) / 2 if periods < 0 else min(1.0, 0.5 + periods)

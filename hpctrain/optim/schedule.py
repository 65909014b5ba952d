"""The learning rate over a run, as a function of the iteration."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from hpctrain.recipes.schema import Schedule, Transition


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear scaling, warm-up, then the schedule's decay (Goyal et al. 2017, arXiv 1706.02677, section 2).

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

    @property
    def begin(self) -> float:
        """Where the warm-up begins, and stays if it is constant."""
        start = self.schedule.warmup_from
        return self.learning_rate if start is None else start

    def __call__(self, iteration: float) -> float:
        """The rate of the step after ``iteration`` steps; at the number of all steps, the rate the run ends at.

        A part of a step is one of ``batch_size`` samples.
        """
        epoch = iteration / self.iterations_per_epoch
        if self.schedule.held == "epoch":
            epoch = math.floor(epoch)
        if epoch < self.schedule.climb_epochs:
            return self._warmup(epoch)
        return self._decayed(epoch)

    def _warmup(self, epoch: float) -> float:
        if self.schedule.warmup == "constant":
            return self.begin
        # A rate for a whole epoch is the one that it ends with: it would begin at none at all.
        climbed = epoch + 1 if self.schedule.held == "epoch" else epoch
        return self.begin + (self.peak - self.begin) * min(1.0, climbed / self.schedule.climb_epochs)

    def _decayed(self, epoch: float) -> float:
        schedule = self.schedule
        match schedule.name:
            case "constant":
                return self.peak
            case "step":
                return self.peak * schedule.gamma ** bisect_right(schedule.milestones, epoch)
            case "piecewise":
                return self.peak * schedule.factors[bisect_right(schedule.milestones, epoch)]
            case "cosine":
                return self._between((1 + math.cos(math.pi * self._done(epoch))) / 2)
            case "polynomial":
                return self._between((1 - self._done(epoch)) ** schedule.power)
            case "triangular":
                return self._between(1 - self._done(epoch))

    def _done(self, epoch: float) -> float:
        """What part of the decay is behind, 0 to 1."""
        since = epoch - self.schedule.climb_epochs
        if self.schedule.decay_steps:
            return min(1.0, since * self.iterations_per_epoch / self.schedule.decay_steps)
        span = self.epochs - self.schedule.climb_epochs
        return since / span if span else 0.0

    def _between(self, share: float) -> float:
        return self.schedule.end_rate + (self.peak - self.schedule.end_rate) * share


def sgd_share(epoch: float, transition: Transition) -> float:
    """SGD's part in the update of rmsprop_to_sgd, 0 to 1 (Akiba et al. 2017, arXiv 1711.04325, section 3.1).

    Exponential up to one half at ``transition.center``, then linear with the same slope up to 1 at
    ``transition.period / 2`` epochs behind it, as the text has it. RMSprop's part is what is left, times
    ``transition.rmsprop_rate``.
    """
    # The displayed formula has twice this slope behind the centre, with which the part would pass 1 on the way.
    periods = (epoch - transition.center) / transition.period
    return math.exp(2 * periods) / 2 if periods < 0 else min(1.0, 0.5 + periods)

"""The learning rate over a run, as a function of the iteration."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.optimizers import Transition
from hpctrain.common.recipes.schedule import Schedule
from hpctrain.common.recipes.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear scaling, warm-up, then the schedule's decay (Goyal et al. 2017, arXiv 1706.02677, section 2).

    Attributes:
        learning_rate: the base rate, for ``schedule.base_batch`` samples a step.
        batch_size: samples of one step over all ranks.
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
        """The rate at the start of the warm-up; constant warm-up stays there. By default at most the peak."""
        start = self.schedule.warmup_from
        return min(self.learning_rate, self.peak) if start is None else start

    def __call__(self, iteration: float) -> float:
        """The rate of the step after ``iteration`` steps; at the number of all steps, the final rate.

        A part of a step is one of ``batch_size`` samples.
        """
        if self.schedule.held != "iteration":
            iteration = math.floor(iteration / self.iterations_per_epoch) * self.iterations_per_epoch
        if iteration < self._climb:
            return self._warmup(iteration)
        return self._decayed(iteration)

    @property
    def _climb(self) -> float:
        """The number of steps of the warm-up."""
        return self.schedule.climb_steps(self.iterations_per_epoch)

    def _warmup(self, iteration: float) -> float:
        if self.schedule.warmup == "constant":
            return self.begin
        # A rate for a whole epoch is the one that it ends with: it would begin at none at all.
        climbed = iteration + (self.iterations_per_epoch if self.schedule.held == "epoch" else 0)
        return self.begin + (self.peak - self.begin) * min(1.0, climbed / self._climb)

    def _decayed(self, iteration: float) -> float:
        schedule = self.schedule
        passed = bisect_right(schedule.milestones, iteration / self.iterations_per_epoch)
        match schedule.name:
            case "constant":
                return self.peak
            case "step":
                return self.peak * schedule.gamma**passed
            case "piecewise":
                return self.peak * schedule.factors[passed]
            case "cosine":
                return self._between((1 + math.cos(math.pi * (1 - self._left(iteration)))) / 2)
            case "polynomial":
                return self._between(self._left(iteration) ** schedule.power)
            case "triangular":
                return self._between(self._left(iteration))

    def _left(self, iteration: float) -> float:
        """The remaining share of the decay, 1 to 0."""
        schedule = self.schedule
        # A warm-up that is given in steps and ends within one: the source counts from the step before.
        begin = math.floor(self._climb) if schedule.warmup_steps else self._climb
        if schedule.decay_from == "start":
            begin = 0
        steps = schedule.decay_steps or self.epochs * self.iterations_per_epoch - begin
        return max(0.0, (begin + steps - iteration) / steps) if steps > 0 else 1.0

    def _between(self, share: float) -> float:
        return self.schedule.end_rate + (self.peak - self.schedule.end_rate) * share


def learning_rate(recipe: Recipe, samples: int) -> LearningRate:
    """The rate of a recipe's steps over ``samples`` training samples.

    Args:
        recipe: worked out for a number of ranks.

    Raises:
        HpctrainError: the batch is so large that an epoch has no step.
    """
    iterations = recipe.batch.iterations(recipe.data.per_epoch(samples))
    if not iterations:
        raise HpctrainError(
            "HT-batch-too-large",
            "batch.size={batch} with batch.drop_last leaves no step: there are {samples} training samples",
            f"a batch of {samples} or less (batch.size; or batch.per_rank and ranks), or --set batch.drop_last=false",
            batch=recipe.global_batch,
            samples=samples,
        )
    return LearningRate(
        schedule=recipe.schedule,
        learning_rate=recipe.optimizer.learning_rate,
        batch_size=recipe.global_batch,
        iterations_per_epoch=iterations,
        epochs=recipe.epochs,
    )


def sgd_share(epoch: float, transition: Transition) -> float:
    """SGD's part in the update of rmsprop_to_sgd (Akiba et al. 2017, arXiv 1711.04325), through the whole of an epoch.

    With e the epoch that has begun, c the ``transition.center`` and p its ``period``: exp(2 (e - c) / p) / 2 before c,
    then 1/2 + 2 (e - c) / p, and 1 from c + p/2 on. RMSprop's part is what is left, times ``transition.rmsprop_rate``.

    That is the formula as it is published: it passes 1 at c + p/4, so that with the paper's c = 10 and p = 5 epoch 12
    has 1.3, and RMSprop's part of that epoch is negative.
    """
    periods = (math.floor(epoch) - transition.center) / transition.period
    if periods < 0:
        return math.exp(2 * periods) / 2
    return 0.5 + 2 * periods if periods < 0.5 else 1.0

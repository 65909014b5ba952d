"""The schema of a recipe's learning rate. hpctrain.common.optim.schedule computes the rate of a step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpctrain.common.files.checked_yaml import Section
from hpctrain.common.recipes.bounds import Count, NotNegative, Positive


class Schedule(Section):
    """The learning rate over the run."""

    name: Literal["constant", "cosine", "step", "piecewise", "polynomial", "triangular"] = Field(
        "constant", description="how the rate changes after the warm-up"
    )
    base_batch: Count | None = Field(
        None,
        description="linear scaling: the rate is learning_rate x batch.size / base_batch (Goyal et al. 2017)",
    )
    warmup_epochs: NotNegative = Field(0, description="epochs before the schedule begins")
    warmup_steps: Positive | None = Field(
        None,
        description="instead of warmup_epochs: steps, possibly fractional where the source counts images; polynomial "
        "and cosine count from the last whole one",
    )
    warmup: Literal["gradual", "constant"] = Field(
        "gradual", description="the rate climbs step by step to the scaled rate, or stays where it starts"
    )
    warmup_from: NotNegative | None = Field(
        None,
        description="where the rate starts, and where triangular starts; by default learning_rate unscaled, or the "
        "scaled rate where a batch below base_batch makes that smaller",
    )
    milestones: tuple[Positive, ...] = Field((), description="epochs at which step and piecewise change the rate")
    gamma: Positive = Field(0.1, description="what step multiplies the rate by at each milestone")
    factors: tuple[Positive, ...] = Field(
        (), description="what piecewise multiplies the scaled rate by before, between and after the milestones"
    )
    power: Positive = Field(2.0, description="exponent of polynomial")
    decay_steps: Count | None = Field(
        None,
        description="steps after which polynomial and cosine reach end_rate (after the warm-up MLPerf's "
        "opt_learning_rate_decay_steps); by default those of the run",
    )
    decay_from: Literal["warmup", "start"] = Field(
        "warmup",
        description="where polynomial and cosine begin to fall: after the warm-up, or with the first step, so that "
        "the warm-up replaces their beginning",
    )
    end_rate: NotNegative = Field(0.0, description="where polynomial, cosine and triangular end")
    peak_epoch: Positive | None = Field(None, description="for triangular, which climbs from warmup_from until then")
    held: Literal["iteration", "epoch", "epoch_start"] = Field(
        "iteration",
        description="how long each value is kept; for an epoch: the warm-up's as it ends, any other as it begins; "
        "epoch_start: the warm-up's too as it begins",
    )

    @property
    def climbs(self) -> bool:
        """Whether the rate first climbs or stays at its beginning, before the schedule begins to apply."""
        return bool(self.peak_epoch or self.warmup_epochs or self.warmup_steps)

    @property
    def climb_share(self) -> float:
        """For a schedule whose warm-up is given in steps: the warm-up's share of its steps."""
        assert self.warmup_steps
        assert self.decay_steps
        ahead = self.warmup_steps if self.decay_from == "warmup" else 0
        return min(1.0, self.warmup_steps / (ahead + self.decay_steps))

    def climb_steps(self, iterations_per_epoch: int) -> float:
        """The number of steps in which the rate climbs from its beginning to the scaled rate."""
        return self.warmup_steps or (self.peak_epoch or self.warmup_epochs) * iterations_per_epoch

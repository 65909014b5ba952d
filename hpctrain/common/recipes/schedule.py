"""The schema of a recipe's learning rate. hpctrain.common.optim.schedule computes the rate of a step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hpctrain.common.recipes.bounds import Count, NotNegative, Positive
from hpctrain.common.recipes.own_keys import SectionOfKind, require_own_keys

_OWN_KEYS = {
    "milestones": ("step", "piecewise"),
    "gamma": ("step",),
    "factors": ("piecewise",),
    "power": ("polynomial",),
    "decay_steps": ("polynomial", "cosine"),
    "decay_from": ("polynomial", "cosine"),
    "warmup_steps": ("polynomial", "cosine"),
    "end_rate": ("polynomial", "cosine", "triangular"),
    "peak_epoch": ("triangular",),
}


class Schedule(SectionOfKind):
    """The learning rate over the run."""

    own_keys = _OWN_KEYS

    name: Literal["constant", "cosine", "step", "piecewise", "polynomial", "triangular"] = "constant"
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

    @model_validator(mode="after")
    def _own_keys(self) -> Schedule:
        require_own_keys(self, self.name, self.own_keys)
        if self.name in ("step", "piecewise") and not self.milestones:
            raise ValueError(f"schedule {self.name!r} needs milestones")
        if self.name == "piecewise" and len(self.factors) != len(self.milestones) + 1:
            raise ValueError("schedule 'piecewise' needs one factor more than milestones")
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError("milestones must rise")
        return self

    @model_validator(mode="after")
    def _climb(self) -> Schedule:
        if self.name == "triangular" and (self.peak_epoch is None or self.warmup_from is None):
            raise ValueError("schedule 'triangular' needs peak_epoch, and warmup_from, where it begins")
        if self.name == "triangular" and (self.warmup_epochs or self.warmup == "constant"):
            raise ValueError("schedule 'triangular' climbs until peak_epoch and has no other warm-up")
        if not self.climbs and (self.warmup_from is not None or self.warmup == "constant"):
            raise ValueError("warmup and warmup_from need warmup_epochs above 0, during which they hold")
        if self.milestones and self.milestones[0] <= self.warmup_epochs:
            raise ValueError("milestones must come after the warm-up")
        return self

    @model_validator(mode="after")
    def _warmup(self) -> Schedule:
        if self.warmup_steps and self.warmup_epochs:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps:g}) and warmup_epochs ({self.warmup_epochs:g}) exclude each "
                "other; --set schedule.warmup_steps=null, or --set schedule.warmup_epochs=0"
            )
        if self.warmup_steps and not self.decay_steps:
            raise ValueError("warmup_steps needs decay_steps: a run counted in steps is counted in steps throughout")
        if self.warmup_steps and self.held != "iteration":
            raise ValueError("warmup_steps is for rates that are held for an iteration")
        if self.name != "triangular" and self.climbs and self.base_batch is None and self.warmup_from is None:
            key = "warmup_steps" if self.warmup_steps else "warmup_epochs"
            raise ValueError(
                f"{key} needs base_batch, whose scaled rate it climbs to from learning_rate, or warmup_from"
            )
        return self

"""The schema of a recipe's learning rate. hpctrain.common.optim.learning_rate computes the rate of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from hpctrain.common.recipes.keys import CheckedSection, Count, NotNegative, Of, Positive

_DECAYING = Of("name", "polynomial cosine")


class Schedule(CheckedSection):
    """The learning rate over the run."""

    name: Literal["constant", "cosine", "step", "piecewise", "polynomial", "triangular"] = Field(
        "constant", description="how the rate changes after the warm-up"
    )
    base_batch: Count | None = Field(
        None,
        description="linear scaling: the rate is learning_rate x batch.size / base_batch (Goyal et al. 2017)",
    )
    warmup_epochs: NotNegative = Field(0, description="epochs before the schedule begins")
    warmup_steps: Annotated[Positive | None, _DECAYING] = Field(
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
    milestones: Annotated[tuple[Positive, ...], Of("name", "step piecewise")] = Field(
        (), description="epochs at which the rate changes"
    )
    gamma: Annotated[Positive, Of("name", "step")] = Field(
        0.1, description="what the rate is multiplied by at each milestone"
    )
    factors: Annotated[tuple[Positive, ...], Of("name", "piecewise")] = Field(
        (), description="what piecewise multiplies the scaled rate by before, between and after the milestones"
    )
    power: Annotated[Positive, Of("name", "polynomial")] = Field(2.0, description="exponent of polynomial")
    decay_steps: Annotated[Count | None, _DECAYING] = Field(
        None,
        description="steps after which the rate reaches end_rate (after the warm-up MLPerf's "
        "opt_learning_rate_decay_steps); by default those of the run",
    )
    decay_from: Annotated[Literal["warmup", "start"], _DECAYING] = Field(
        "warmup",
        description="where polynomial and cosine begin to fall: after the warm-up, or with the first step, so that "
        "the warm-up replaces their beginning",
    )
    end_rate: Annotated[NotNegative, Of("name", "polynomial cosine triangular")] = Field(
        0.0, description="where the rate ends"
    )
    peak_epoch: Annotated[Positive | None, Of("name", "triangular")] = Field(
        None, description="the rate climbs from warmup_from until then"
    )
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

    def faults(self) -> Iterator[str]:
        yield from self._of_decay()
        yield from self._of_warmup()

    def _of_decay(self) -> Iterator[str]:
        name, milestones = self.name, self.milestones
        if name in ("step", "piecewise") and not milestones:
            yield f"schedule {name!r} needs milestones"
        if name == "piecewise" and len(self.factors) != len(milestones) + 1:
            yield "schedule 'piecewise' needs one factor more than milestones"
        if list(milestones) != sorted(set(milestones)):
            yield "milestones must rise"
        if milestones and milestones[0] <= self.warmup_epochs:
            yield "milestones must come after the warm-up"
        if name == "triangular" and (self.peak_epoch is None or self.warmup_from is None):
            yield "schedule 'triangular' needs peak_epoch, and warmup_from, where it begins"

    def _of_warmup(self) -> Iterator[str]:
        triangular, steps = self.name == "triangular", self.warmup_steps
        if triangular and (self.warmup_epochs or self.warmup == "constant"):
            yield "schedule 'triangular' climbs until peak_epoch and has no other warm-up"
        if not self.climbs and (self.warmup_from is not None or self.warmup == "constant"):
            yield "warmup and warmup_from need warmup_epochs above 0, during which they hold"
        if steps and self.warmup_epochs:
            yield (
                f"warmup_steps ({steps:g}) and warmup_epochs ({self.warmup_epochs:g}) exclude each other; --set "
                "schedule.warmup_steps=null, or --set schedule.warmup_epochs=0"
            )
        if steps and not self.decay_steps:
            yield "warmup_steps needs decay_steps: a run counted in steps is counted in steps throughout"
        if steps and self.held != "iteration":
            yield "warmup_steps is for rates that are held for an iteration"
        if not triangular and self.climbs and self.base_batch is None and self.warmup_from is None:
            key = "warmup_steps" if steps else "warmup_epochs"
            yield f"{key} needs base_batch, whose scaled rate it climbs to from learning_rate, or warmup_from"

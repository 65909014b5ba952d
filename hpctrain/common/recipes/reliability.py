"""The sections of a recipe about faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator

from hpctrain.common.errors import InvalidValueError
from hpctrain.common.files.checked_yaml import Section
from hpctrain.common.recipes.keys import CheckedSection, Count, Positive


class GuardSettings(Section):
    """How often ranks prove that their parameters are equal."""

    every: Count = Field(100, description="steps between two checks; the first step is always checked")


class FaultTolerance(CheckedSection):
    """What the run does when a rank dies."""

    lost_rank: Literal["stop", "shrink"] = Field(
        "stop",
        description="end resumably, or, from the first step on, continue with the remaining ranks (backend mpi, "
        "Open MPI 5)",
    )
    min_ranks: Count = Field(1, description="with fewer left, the run saves its state and ends resumably")

    @property
    def fault_tolerant(self) -> bool:
        """Whether the ranks continue without one that died, from the first step on."""
        return self.lost_rank == "shrink"

    def faults(self) -> Iterator[str]:
        if not self.fault_tolerant and self.min_ranks > 1:
            yield (
                f"min_ranks: {self.min_ranks} needs lost_rank: shrink; with lost_rank: stop the run ends with its "
                "first dead rank"
            )


class Checkpointing(CheckedSection):
    """When checkpoints are written besides the end of each epoch and a stop, and which are kept."""

    every_steps: Count | Literal["auto"] | None = Field(
        None,
        description="also after every so many steps of the run; auto: as often as loses the least time, by what a save "
        "costs and how often the run fails",
    )
    mtbf_hours: Positive | None = Field(
        None,
        description="for every_steps: auto, the mean time between failures of the whole job; without it that of the "
        "failures that the run has seen, and 24 as long as it has seen none",
    )
    keep_last: Count = Field(
        2, description="how many of the newest to keep; the second is the fallback for a damaged newest one"
    )
    keep_best: bool = Field(False, description="also the one whose test accuracy is the highest")
    keep_every_epochs: Count | None = Field(None, description="also the last of every so many epochs")

    @field_validator("every_steps", mode="before")
    @classmethod
    def _number_or_auto(cls, value: object) -> object:
        """One sentence, where pydantic has one for each of the two."""
        if value in (None, "auto") or (type(value) is int and value >= 1):
            return value
        raise InvalidValueError("HT-value-not-valid", "a number of steps, or auto, not {value!r}", value=value)

    def faults(self) -> Iterator[str]:
        if self.mtbf_hours is not None and self.every_steps != "auto":
            yield "mtbf_hours needs every_steps: auto"


class Numbers(Section):
    """What happens when a loss or gradient is not finite on any rank."""

    non_finite: Literal["stop", "skip"] = Field(
        "stop", description="end the run, or leave the step's update out on all ranks"
    )
    limit: Count = Field(3, description="skipped steps in a row until the run ends")

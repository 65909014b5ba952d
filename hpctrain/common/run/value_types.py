"""The values that events and records of a run may have."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt
from pydantic import AfterValidator, AllowInfNan, BaseModel, BeforeValidator, ConfigDict, Field, Strict

from hpctrain.common.files.printable import shortened


def _finite_or_none(value: Any) -> Any:
    """JSON has no word for numbers that are not finite, so an event has none from the start."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def ratio(amount: float | None, of: float | None) -> float | None:
    """A quotient of measurements; None where one is not known, or it is not finite: files can have any divisor."""
    if amount is None or not of:
        return None
    value = amount / of
    return value if math.isfinite(value) else None


LIMIT = 2**53
"""From here on, numbers are not whole any more where they meet others."""

Count = Annotated[int, Strict(), Ge(0), Lt(LIMIT)]

Seconds = Annotated[float, Strict(), Ge(0), Lt(1e11), AllowInfNan(False)]
"""No clock shows more."""

Rate = Annotated[float, Strict(), Gt(0), AllowInfNan(False)]
"""A quantity per second."""

Number = Annotated[Annotated[float, Strict()] | None, BeforeValidator(_finite_or_none)]
"""What was measured; None for what is not finite or not known."""

Text = Annotated[str, AfterValidator(shortened)]
"""What a reader is shown: of what is longer than any sentence, the beginning."""

Outcome = Literal["done", "failed", "resumable"]
"""What a run is when an attempt has ended."""

EnergySource = Literal["gpu", "cpu", "dram"]

Joules = Annotated[float, Strict(), Ge(0), Lt(1e15), AllowInfNan(False)]
"""More a country does not draw."""


class HostEnergy(BaseModel):
    """What one host has drawn since one meter began; further readings of that meter contain this one."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    began: Seconds = Field(description="when, in seconds since the epoch; with the host it identifies the meter")
    seconds: Seconds = Field(description="since then")
    joules: dict[EnergySource, Joules] = Field(
        description="since then: gpu, cpu (the packages), dram; only of what could be read"
    )
    missing: tuple[Text, ...] = Field(default=(), description="what could not be read, and why")

"""What ``hpctrain verify`` found: the content of ``verify.json``, which is what ``--json`` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from hpctrain.common.run.value_types import Count, Number, Text


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, defer_build=True)


class TensorDifference(_Part):
    """A tensor that differs at a step.

    Attributes:
        step: counted from 1.
        rank: the one that has it.
        one_process, ranks: the element that differs most, or of a large tensor its norm.
        difference: the norm of the difference, relative to the tensor's.
        noise: what rounding errors make, likewise.
        factor: what the tensor was multiplied by, if it was.
    """

    step: Count
    kind: Text
    name: Text
    shape: Annotated[tuple[Count, ...], Field(max_length=64)]
    rank: Count
    one_process: Number
    ranks: Number
    difference: Number
    noise: Number
    factor: Number


class StepDifference(_Part):
    """How far ranks were from one process at a step, and what rounding errors made there, relative to the tensor."""

    difference: Number
    noise: Number


class Verdict(BaseModel):
    """What was found.

    Attributes:
        equal: whether the ranks compute what one process computes.
        largest_difference, noise: the largest of all steps.
        first: the first tensor that differs.
        cause: why, most probably.
        notes: what was not seen, and what else there is to know.
        run: the directory of the ranks' run, which is not written.
    """

    model_config = ConfigDict(defer_build=True)

    equal: bool
    ranks: Count
    steps: Count
    largest_difference: Number
    noise: Number
    differences: list[StepDifference]
    first: TensorDifference | None
    cause: Text
    notes: list[Text]
    run: Path = Field(Path(), exclude=True)

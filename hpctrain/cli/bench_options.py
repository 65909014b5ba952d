"""Options and output that several commands of ``hpctrain bench`` share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.report.say import tell, terminal

if TYPE_CHECKING:
    from hpctrain.common.run.plan import HostOptions


class ModelOption(StrEnum):
    """The networks of ``bench step``."""

    convnet = "convnet"
    resnet50 = "resnet50"
    transformer = "transformer"
    gpt = "gpt"
    digits = "digits"


# Samples a rank that one core computes in well under a second.
BATCHES = {
    ModelOption.convnet: 16,
    ModelOption.resnet50: 8,
    ModelOption.transformer: 8,
    ModelOption.gpt: 8,
    ModelOption.digits: 32,
}

Ranks = Annotated[int | None, typer.Option("-np", metavar="N", min=1, help="Number of ranks (2, or the hosts' slots).")]


@dataclass(frozen=True, kw_only=True)
class TimedSteps:
    """The training steps that ``bench step`` times.

    Attributes:
        samples: of a rank in each step.
        rounds: the number of steps of each variant.
        image_size: the side length of the images in pixels; None for 64.
    """

    ranks: int | None
    hosts: HostOptions
    model: ModelOption
    samples: int
    rounds: int
    image_size: int | None


# Below this load average, a measurement counts as undisturbed.
_QUIET = 0.5


def print_tables(*tables: object, left_out: Mapping[str, str], load: float) -> None:
    """Print tables, with warnings about what was not measured and about other processes."""
    for table in tables:
        terminal().print(table)
    if load > _QUIET:
        tell(f"other processes were running: the load was {load} before; measure again when it is near 0")
    for name, why in left_out.items():
        tell(f"left out: {name}: {why}")

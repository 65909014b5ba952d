"""Options and output that several commands of ``hpctrain bench`` share."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import typer

from hpctrain.report.say import tell, terminal


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

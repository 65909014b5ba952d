"""Step times over batches, measured on one node."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import Field

from hpctrain.common.cluster.gpu_models import gpu_reported_as, gpus
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.checked_yaml import Section
from hpctrain.common.recipes.keys import Count, NotNegative, Positive
from hpctrain.control.predict.compute import CPU, Precision


class SweepRow(Section):
    """The steps of one batch.

    Attributes:
        batch: the number of samples of a rank.
        spread: of the logarithm of its time, between rounds.
    """

    batch: Count
    median_s: Positive
    spread: NotNegative


class Sweep(Section):
    """Step times without communication, as ``hpctrain bench step --sweep --json`` writes them."""

    model: str
    device: str = Field(description="name of a GPU that predictions know, or cpu")
    precision: Precision = "float32"
    ranks: Count = Field(description="that ran at the same time, on one host")
    cores: Count | None = Field(None, description="of the host, which they shared")
    image_size: Count | None = None
    rows: tuple[SweepRow, ...] = Field(min_length=2)
    fixed_s: float = Field(description="a of t(b) = a + c b")
    per_sample_s: float = Field(description="c of t(b) = a + c b")


def make_sweep(
    measured: Mapping[str, Any], model: str, *, image_size: int | None, precision: Precision = "float32"
) -> Sweep:
    """A sweep from the times of each round.

    Args:
        measured: ``seconds`` of a step in each round, by the batch; ``gpu``: what its driver calls it, None for the
            host's cores; ``ranks``, which ran at the same time on the ``cores`` of a host.
        image_size: pixels a side; only residual networks have images.

    Raises:
        HpctrainError: a GPU that predictions do not know.
    """
    gpu = measured["gpu"]
    device = CPU if gpu is None else gpu_reported_as(gpu)
    if device is None:
        raise HpctrainError(
            "HT-choice-unknown",
            "predictions do not know the GPU {gpu!r}",
            f"known: {', '.join(sorted(gpus()))}",
            gpu=gpu,
        )
    rows = [
        SweepRow(batch=int(batch), median_s=statistics.median(times), spread=float(np.log(times).std()))
        for batch, times in measured["seconds"].items()
    ]
    slope, constant = np.polyfit([row.batch for row in rows], [row.median_s for row in rows], 1)
    return Sweep(
        model=model,
        device=device,
        precision=precision,
        ranks=measured["ranks"],
        cores=measured["cores"],
        image_size=image_size,
        rows=tuple(sorted(rows, key=lambda row: row.batch)),
        fixed_s=float(constant),
        per_sample_s=float(slope),
    )

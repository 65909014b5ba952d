"""The option ``--gpu`` of commands that run a training, and predict it on the way."""

from __future__ import annotations

from typing import Annotated

import typer

PredictedGpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME",
        help="Predict the run on these GPUs, or on `cpu`, to compare with what it takes: RUN_DIR/prediction.json.",
    ),
]


def require_gpu(name: str | None) -> None:
    """Refuse a GPU that predictions do not know.

    Raises:
        HpctrainError: there is none of that name.
    """
    # The constants take longer to read than a command without a prediction should.
    if name is None or name == "cpu":
        return
    from hpctrain.common.cluster.gpu_models import gpu

    gpu(name)

"""``hpctrain job``, which job scripts call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpctrain.report.output import tell


def job(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of job.sh and job.json.")],
    told: Annotated[str | None, typer.Argument(metavar="SIGNAL", help="The signal that came before.")] = None,
) -> None:
    """Do in a job of Slurm what its script leaves to hpctrain."""
    from hpctrain.control.schedulers.slurm.batch import run_batch

    raise typer.Exit(run_batch(directory, told, tell))

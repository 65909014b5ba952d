"""The outcome of a run."""

from __future__ import annotations

from pydantic import BaseModel

from hpctrain.common.run.directory import RunDirectory, read_model


class _Summary(BaseModel):
    status: str


def summary_status(directory: RunDirectory) -> str | None:
    """``done``, ``failed`` or ``resumable`` from ``summary.json``; None without that file.

    Raises:
        HpctrainError: it is damaged.
    """
    return read_model(directory.summary, _Summary).status if directory.summary.exists() else None

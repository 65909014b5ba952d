"""The files for TensorBoard of a run written by hand."""

from __future__ import annotations

from hpctrain.common.run.directory import RunDirectory
from hpctrain.report.tracking.sending import send_later


def write_tensorboard(directory: RunDirectory) -> None:
    """Write the curves of a run that has ended."""
    assert send_later(directory.path, "tensorboard", print) == 0

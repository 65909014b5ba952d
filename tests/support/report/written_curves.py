"""The files for TensorBoard of a run written by hand."""

from __future__ import annotations

from hpctrain.common.run.directory import RunDirectory
from hpctrain.report.tracking.following import follow
from hpctrain.report.tracking.tensorboard_files import TensorBoardFiles


def write_tensorboard(directory: RunDirectory) -> None:
    """Write the curves of a run that has ended."""
    assert follow(directory, TensorBoardFiles(directory), ended=lambda seconds: True, say=print)

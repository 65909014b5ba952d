"""A run's curves as files for TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence

from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from hpctrain.common.files.private import make_folder, private
from hpctrain.common.run.directory import RunDirectory
from hpctrain.report.tracking.following import NewEvent
from hpctrain.report.tracking.progress import TrackerProgress

# TensorBoard recognises an event file by this part of its name. One fixed name: writing again replaces.
_FILE_NAME = "events.out.tfevents.0000000000.hpctrain"


class TensorBoardFiles:
    """Implements :class:`hpctrain.report.tracking.following.Tracking` with scalars over the number of the step.

    The file is made at the first scalar, so a script that takes no step and logs nothing leaves none.

    It uses a ``RecordWriter`` because TensorBoard's own ``EventFileWriter`` imports TensorFlow if that is installed.
    """

    rewrites = True
    place = "tensorboard"

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._records: RecordWriter | None = None

    def open(self) -> TrackerProgress:
        self.close()
        return TrackerProgress()

    def send(self, entries: Sequence[NewEvent]) -> None:
        for point in (entry.point for entry in entries if entry.point):
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._append(TensorBoardEvent(wall_time=point.time, step=point.iteration, summary=Summary(value=values)))

    def close(self) -> None:
        records, self._records = self._records, None
        if records:
            records.close()

    def _append(self, entry: TensorBoardEvent) -> None:
        if self._records is None:
            make_folder(self._directory.tensorboard, within=self._directory.path)
            # Unbuffered: TensorBoard sees each record whole, as soon as it is there.
            path = self._directory.tensorboard / _FILE_NAME
            self._records = RecordWriter(open(path, "wb", buffering=0, opener=private))  # noqa: SIM115 - is closed
            self._records.write(TensorBoardEvent(file_version="brain.Event:2").SerializeToString())
        self._records.write(entry.SerializeToString())

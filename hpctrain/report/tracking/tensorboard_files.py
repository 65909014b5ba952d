"""A run's curves as files for TensorBoard."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpctrain.common.files.regular import make_folder, private
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event
from hpctrain.common.run.events.kinds import LogEvent, StartEvent, StepEvent
from hpctrain.report.tracking.curves import Curves

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
    from tensorboard.summary.writer.record_writer import RecordWriter

# TensorBoard recognises an event file by the beginning, and reads the files of a folder in the order of their names.
_FILE_NAME = "events.out.tfevents.{:010d}.hpctrain"


class TensorBoardFiles:
    """Implements :class:`hpctrain.report.tracking.sending.Tracking` with scalars over the number of the step.

    The file is made at the first scalar, so a script that takes no step and logs nothing leaves none. Of steps that are
    repeated after a resume TensorBoard shows the last, because the file says where a session begins.

    It uses a ``RecordWriter`` because TensorBoard's own ``EventFileWriter`` imports TensorFlow if that is installed.
    TensorBoard is imported at the first scalar, since it imports boto3, which takes longer than a short script.
    """

    def __init__(self, directory: RunDirectory) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ModuleNotFoundError("No module named 'tensorboard'", name="tensorboard")
        self._directory = directory
        self._records: RecordWriter | None = None
        self._curves = Curves()
        self._begins = False

    def send(self, events: Sequence[Event]) -> None:
        for event in events:
            self._begins |= isinstance(event, StartEvent)
            point = self._curves.point(event)
            if point is None:
                continue
            from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
            from tensorboard.compat.proto.event_pb2 import SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary

            if self._begins and isinstance(event, StepEvent | LogEvent):
                session = SessionLog(status=SessionLog.START)
                self._append(TensorBoardEvent(wall_time=point.time, step=point.iteration, session_log=session))
                self._begins = False
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._append(TensorBoardEvent(wall_time=point.time, step=point.iteration, summary=Summary(value=values)))

    def close(self) -> None:
        if self._records:
            self._records.close()

    def _append(self, entry: TensorBoardEvent) -> None:
        if self._records is None:
            from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
            from tensorboard.summary.writer.record_writer import RecordWriter

            make_folder(self._directory.tensorboard, within=self._directory.path)
            # Unbuffered: TensorBoard sees each record whole, as soon as it is there.
            path = self._directory.tensorboard / _FILE_NAME.format(int(entry.wall_time))
            self._records = RecordWriter(open(path, "wb", buffering=0, opener=private))  # noqa: SIM115 - is closed
            self._records.write(TensorBoardEvent(file_version="brain.Event:2").SerializeToString())
        self._records.write(entry.SerializeToString())

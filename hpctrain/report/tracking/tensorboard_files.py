"""A run's curves as files for TensorBoard."""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import Self

from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.private import make_folder, private
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event, EventsFile, kept
from hpctrain.common.run.events.kinds import StartEvent
from hpctrain.report.tracking.curves import Curves, Point

# TensorBoard recognises an event file by this part of its name. One fixed name: writing again replaces.
_FILE_NAME = "events.out.tfevents.0000000000.hpctrain"


class TensorBoardWriter:
    """Writes events as TensorBoard scalars over the number of the step; see :mod:`hpctrain.report.tracking.curves`.

    The file is made at the first scalar, so a script that takes no step and logs nothing leaves none.

    It uses a ``RecordWriter`` because TensorBoard's own ``EventFileWriter`` imports TensorFlow if that is installed.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._records: RecordWriter | None = None
        self._curves = Curves()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._records:
            self._records.close()

    def show(self, event: Event) -> None:
        """Write one event; kinds without a curve are skipped.

        Raises:
            HpctrainError: the disk is full.
        """
        if isinstance(event, StartEvent) and event.attempt > 1:
            self._begin_again(event)
        elif point := self._curves.point(event):
            self._write(point)

    def _begin_again(self, start: StartEvent) -> None:
        """Write the file anew with what the run keeps of its earlier attempts."""
        if self._records:
            self._records.close()
            self._records = None
        self._curves = Curves()
        earlier = itertools.takewhile(lambda event: event != start, kept(EventsFile(self._directory.events)))
        for point in map(self._curves.point, earlier):
            if point:
                self._write(point)
        self._curves.point(start)

    def _write(self, point: Point) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        self._append(TensorBoardEvent(wall_time=point.time, step=point.iteration, summary=Summary(value=values)))

    def _append(self, entry: TensorBoardEvent) -> None:
        try:
            if self._records is None:
                make_folder(self._directory.tensorboard, within=self._directory.path)
                # Unbuffered: TensorBoard sees each record whole, as soon as it is there.
                path = self._directory.tensorboard / _FILE_NAME
                self._records = RecordWriter(open(path, "wb", buffering=0, opener=private))  # noqa: SIM115 - is closed
                self._records.write(TensorBoardEvent(file_version="brain.Event:2").SerializeToString())
            self._records.write(entry.SerializeToString())
        except OSError as error:
            raise disk_error(error, self._directory.tensorboard) from error


def write_tensorboard(directory: RunDirectory) -> None:
    """Write the curves of a recorded run, finished or not.

    Raises:
        HpctrainError: its events cannot be read, or the disk is full.
    """
    with TensorBoardWriter(directory) as writer:
        for event in kept(EventsFile(directory.events)):
            if not isinstance(event, StartEvent):
                writer.show(event)

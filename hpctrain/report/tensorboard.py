"""A run's curves as files for TensorBoard."""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import Self

from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from hpctrain.files.disk import disk_error
from hpctrain.files.private import make_folder, private
from hpctrain.run.directory import RunDirectory
from hpctrain.run.events import Event, kept, read_events
from hpctrain.run.events.kinds import EpochEvent, LogEvent, StartEvent, StepEvent

# TensorBoard recognises an event file by this part of its name. One fixed name: writing again replaces.
_FILE_NAME = "events.out.tfevents.0000000000.hpctrain"


class TensorBoardWriter:
    """Writes events as TensorBoard scalars over the number of the step: ``step/…``, ``epoch/…``, and what scripts log.

    The file is made at the first of them, so a script that takes no step and logs nothing leaves none.

    A ``RecordWriter`` over a plain file: TensorBoard's own ``EventFileWriter`` imports TensorFlow where it finds it.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._records: RecordWriter | None = None
        self._iteration = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._records:
            self._records.close()

    def show(self, event: Event) -> None:
        """Write one event; kinds without a curve are passed over.

        Raises:
            HpctrainError: the disk is full.
        """
        match event:
            case StartEvent() if event.attempt > 1:
                self._begin_again(event)
            case StepEvent():
                self._iteration = event.iteration
                self._write(event, _named("step", _step_scalars(event)))
            case EpochEvent():
                self._write(event, _named("epoch", {**event.metrics, **event.speeds}))
            case LogEvent():
                self._iteration = event.iteration
                self._write(event, event.values)

    def _begin_again(self, start: StartEvent) -> None:
        """Write the file anew with what the run keeps of its earlier attempts."""
        if self._records:
            self._records.close()
            self._records = None
        earlier = itertools.takewhile(lambda event: event != start, read_events(self._directory.events))
        for event in kept([*earlier, start]):
            if not isinstance(event, StartEvent):
                self.show(event)

    def _write(self, event: Event, scalars: dict[str, float | None]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items() if value is not None]
        self._append(TensorBoardEvent(wall_time=event.time, step=self._iteration, summary=Summary(value=values)))

    def _append(self, entry: TensorBoardEvent) -> None:
        try:
            if self._records is None:
                make_folder(self._directory.tensorboard)
                # Unbuffered: TensorBoard sees each record whole, as soon as it is there.
                path = self._directory.tensorboard / _FILE_NAME
                self._records = RecordWriter(open(path, "wb", buffering=0, opener=private))  # noqa: SIM115 - is closed
                self._records.write(TensorBoardEvent(file_version="brain.Event:2").SerializeToString())
            self._records.write(entry.SerializeToString())
        except OSError as error:
            raise disk_error(error, self._directory.tensorboard) from error


def _step_scalars(step: StepEvent) -> dict[str, float | None]:
    communication, samples = step.communication_seconds, step.samples
    return {
        "loss": step.loss,
        "learning_rate": step.learning_rate,
        "seconds": step.seconds,
        "samples_per_s": None if samples is None or not step.seconds else samples / step.seconds,
        "communication_share": None if communication is None else communication / step.seconds,
    }


def _named(group: str, scalars: dict[str, float | None]) -> dict[str, float | None]:
    return {f"{group}/{name}": value for name, value in scalars.items()}

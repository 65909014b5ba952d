"""Records a user's script as events of its run: its steps, counted automatically, and the values that it logs.

Rank 0 alone records, once per process. The other ranks record nothing, and nothing here is collective.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import stat
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpctrain.common.cluster.launcher import detect
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.events import Event, EventsFile, EventWriter
from hpctrain.common.run.events.kinds import (
    ContinuedEvent,
    EnergyEvent,
    LogEvent,
    RunEvent,
    SavedEvent,
    StepEvent,
    StoppedEvent,
)
from hpctrain.common.run.values import LIMIT
from hpctrain.worker.comm import Communicator, forks
from hpctrain.worker.comm.after_import import change_after_import

if TYPE_CHECKING:
    from hpctrain.worker.energy_meter import HostMeter

# Values that are logged more often are recorded, but not printed.
_PRINT_SECONDS = 1.0
# How often what is saved after one step is recorded: after a long evaluation a script may save once more.
_SAVED_SECONDS = 1.0
# The longest time whose energy a killed script may leave unrecorded.
_ENERGY_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class EarlierAttempts:
    """What the earlier attempts of a script have done.

    Attributes:
        begun: when the first of them began to train.
        saves: when the script has saved something or was stopped, and after which step.
        stopped_at: the step after which the last of them was stopped; 0 if it was not.
        reached: the last step of them, or the furthest that was saved.
        counted_before: the steps that the optimizer had counted when the first of them began.
    """

    begun: float
    saves: Sequence[SavedEvent | StoppedEvent]
    stopped_at: int
    reached: int
    counted_before: int

    @classmethod
    def of(cls, events: EventsFile) -> EarlierAttempts | None:
        """Those in a file; None if they made no step."""
        last = events.last_step()
        if last is None:
            return None
        saves = [
            event for event in events.few(StoppedEvent, SavedEvent) if isinstance(event, StoppedEvent | SavedEvent)
        ]
        begun = min((event.time for event in events.few(RunEvent)), default=0.0)
        counted_before = max((event.counted_before for event in events.few(ContinuedEvent)), default=0)
        stopped_at = saves[-1].iteration if saves and isinstance(saves[-1], StoppedEvent) else 0
        reached = max(event.iteration for event in (*saves, last))
        return cls(begun=begun, saves=saves, stopped_at=stopped_at, reached=reached, counted_before=counted_before)

    def goes_on_at(self, loaded: Sequence[float], number: int | None) -> int:
        """The step after which a script goes on that has loaded files of these times, and whose first one has a number.

        A file was written when something was saved, whatever name it has by now. One from before the first step, such
        as weights to begin with, says nothing.
        """
        if number and 0 < (place := number - 1 - self.counted_before) <= self.reached:
            return place
        own = [time for time in loaded if time > self.begun]
        if not own or not self.saves:
            return self.stopped_at
        newest = max(own)
        return min(self.saves, key=lambda event: abs(event.time - newest)).iteration


class Recording:
    """Counts steps, records logged values, and prints the newest now and then.

    Args:
        path: the run's events; None for a script that was started without ``hpctrain run``.
        earlier: what earlier attempts have done; None for the first one.
    """

    def __init__(self, path: Path | None = None, earlier: EarlierAttempts | None = None) -> None:
        self.steps = earlier.stopped_at if earlier else 0
        self.resumed = earlier is not None
        # Until the first step of a resumed script, which has loaded its state by then.
        self._earlier = earlier
        self._loaded: list[float] = []
        self._written: set[float | None] = set()
        self._saved, self._saved_at = self.steps, time.monotonic()
        # The launcher writes to the same file, and so do ranks that report a stall.
        self._events = EventWriter(path, alone=False) if path else None
        self._model: weakref.ref[object] | None = None
        self._step_began = time.perf_counter()
        self._printed_at = -_PRINT_SECONDS
        self._unprinted = ""
        self._host = ""
        self._meter: HostMeter | None = None
        self._measured_at = 0.0

    def begin_run(
        self, comm: Communicator, framework: str, model: object, parameters: int, bucket_mb: float | None = None
    ) -> bool:
        """Record what is trained. Returns whether its steps are counted, which holds for the first model."""
        if self._model is not None:
            return self._model() is model
        self._model = weakref.ref(model)
        if self._events:
            # Imported here because it loads a library that `import hpctrain` can do without.
            from hpctrain.worker.energy_meter import HostMeter

            self._host, self._meter, self._measured_at = comm.host, HostMeter(), time.monotonic()
        self._step_began = time.perf_counter()
        self._emit(
            RunEvent(
                recipe=None,
                framework=framework,
                backend=comm.backend,
                ranks=comm.size,
                epochs=None,
                iterations_per_epoch=None,
                parameters=parameters,
                bucket_mb=bucket_mb,
            )
        )
        return True

    def step_done(self, learning_rate: float | None, number: int | None = None, *, gathered: int | None = None) -> None:
        """Count and record a step that ends now.

        Args:
            number: what the script's own state says that it is.
            gathered: the bytes of rows that were gathered for it.
        """
        now = time.perf_counter()
        if self._earlier:
            loaded = [each for each in self._loaded if each not in self._written]
            self.steps = self._saved = self._earlier.goes_on_at(loaded, number)
            self._emit(ContinuedEvent(iteration=self.steps, counted_before=self._earlier.counted_before))
            self._earlier = None
        elif self.steps == 0 and number and number > 1:
            # The optimizer of a model that was trained before.
            self._emit(ContinuedEvent(iteration=0, counted_before=number - 1))
        self.steps += 1
        if self._events:
            self._emit(
                StepEvent(
                    iteration=self.steps,
                    epoch=None,
                    loss=None,
                    learning_rate=learning_rate,
                    samples=None,
                    seconds=now - self._step_began,
                    communication_seconds=None,
                    gathered_bytes=gathered,
                )
            )
        self._step_began = now
        if time.monotonic() - self._measured_at >= _ENERGY_SECONDS:
            self._measure()

    def saved(self, step: int, modified: float | None) -> None:
        """Record that the script has saved what it had after a step, perhaps into a file, which has a time."""
        now = time.monotonic()
        if self._earlier:
            # What this attempt has written itself does not say where it goes on.
            self._written.add(modified)
        elif step != self._saved or now - self._saved_at >= _SAVED_SECONDS:
            self._saved, self._saved_at = step, now
            self._emit(SavedEvent(iteration=step))

    def loaded(self, modified: float) -> None:
        """Note that the script has loaded a file that was written at this time."""
        if self._earlier:
            self._loaded.append(modified)

    def stopped(self, reason: str) -> None:
        """Record that the script has saved its state and leaves, because it was asked to."""
        self._emit(StoppedEvent(iteration=self.steps, reason=reason))

    def end(self) -> None:
        """Record what this host has drawn since the run began. Idempotent."""
        self._measure()
        if self._meter:
            self._meter.close()
            self._meter = None

    def _measure(self) -> None:
        if self._meter:
            self._emit(EnergyEvent(iteration=self.steps, hosts={self._host: self._meter.reading()}))
            self._measured_at = time.monotonic()

    def log(self, values: Mapping[str, float], step: int | None = None, *, quiet: bool = False) -> None:
        """Record values of a step, by default the last one that was counted; ``quiet`` prints nothing."""
        step = self.steps if step is None else step
        self._emit(LogEvent(iteration=step, values=dict(values)))
        if not quiet:
            self._print(f"step {step:,}  {'  '.join(f'{name} {value:.6g}' for name, value in values.items())}")

    def _emit(self, event: Event) -> None:
        if self._events:
            self._events.emit(event)

    def _print(self, line: str) -> None:
        if not self._unprinted and self._printed_at < 0:
            atexit.register(self.flush)
        self._unprinted = line
        if time.monotonic() - self._printed_at >= _PRINT_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Print the newest line unless it was printed."""
        if self._unprinted:
            print(self._unprinted, file=sys.stderr, flush=True)
            self._printed_at, self._unprinted = time.monotonic(), ""


_recording: Recording | None = None
# Checkpoints of torch.distributed.checkpoint that threads still write.
_saves_in_flight = 0
# Whether the script has set where its data continue, or was warned that it has not.
_data_position_set = False


def begin(path: Path) -> None:
    """Record this process's script in the events of a run. Called on rank 0 before the script begins."""
    global _recording
    # The file may not exist yet: ranks that are started by hand may be the first to write it.
    _recording = Recording(path, EarlierAttempts.of(EventsFile(path)))


def watch_files() -> None:
    """Note what the script saves and loads by PyTorch, by which it is known where it goes on after a resume."""
    change_after_import({"torch": _watch_files, "torch.distributed.checkpoint": _watch_checkpoints})


def _watch_files(torch: ModuleType) -> None:
    save, load = torch.save, torch.load

    @functools.wraps(save)
    def saving(*arguments: Any, **settings: Any) -> Any:
        own = recording()
        if _saves_in_flight and threading.current_thread() is not threading.main_thread():
            # Parts of a checkpoint that was begun at an earlier step.
            own = None
        # A thread may save while the script trains on.
        step = own.steps if own else 0
        done = save(*arguments, **settings)
        modified = _modified(arguments[1] if len(arguments) > 1 else settings.get("f"))
        # Objects that are pickled save their storages too, in memory and in PyTorch's old format. Others save in memory
        # what they then write into a file.
        if own and (modified or settings.get("_use_new_zipfile_serialization", True)):
            own.saved(step, modified)
        return done

    @functools.wraps(load)
    def loading(*arguments: Any, **settings: Any) -> Any:
        found = load(*arguments, **settings)
        if (modified := _modified(arguments[0] if arguments else settings.get("f"))) and (own := recording()):
            own.loaded(modified)
        return found

    # In both places, because functions are pickled by the name of their module.
    torch.save = torch.serialization.save = saving  # type: ignore[attr-defined]
    torch.load = torch.serialization.load = loading  # type: ignore[attr-defined]


def _watch_checkpoints(module: ModuleType) -> None:
    """Note checkpoints of torch.distributed.checkpoint, whose file of metadata is written last."""
    save, async_save, load = module.save, module.async_save, module.load

    @functools.wraps(save)
    def saving(*arguments: Any, **settings: Any) -> Any:
        own = recording()
        step = own.steps if own else 0
        done = save(*arguments, **settings)
        if own:
            own.saved(step, _metadata_modified(settings))
        return done

    @functools.wraps(async_save)
    def beginning(*arguments: Any, **settings: Any) -> Any:
        global _saves_in_flight
        own = recording()
        if own is None:
            return async_save(*arguments, **settings)
        step = own.steps
        _saves_in_flight += 1

        def ended(future: Future[Any]) -> None:
            global _saves_in_flight
            _saves_in_flight -= 1
            if not (future.cancelled() or future.exception()):
                own.saved(step, _metadata_modified(settings))

        try:
            begun = async_save(*arguments, **settings)
        except BaseException:
            _saves_in_flight -= 1
            raise
        # Where staging has a future of its own, it returns both.
        getattr(begun, "upload_completion", begun).add_done_callback(ended)
        return begun

    @functools.wraps(load)
    def loading(*arguments: Any, **settings: Any) -> None:
        load(*arguments, **settings)
        if (modified := _metadata_modified(settings)) and (own := recording()):
            own.loaded(modified)

    module.save, module.async_save, module.load = saving, beginning, loading  # type: ignore[attr-defined]


def _metadata_modified(settings: Mapping[str, Any]) -> float | None:
    """When the checkpoint was written that these arguments name; None for one that is not in a folder."""
    storage = settings.get("storage_reader") or settings.get("storage_writer")
    for folder in (settings.get("checkpoint_id"), getattr(storage, "path", None)):
        if isinstance(folder, str | os.PathLike) and (found := _modified(Path(folder) / ".metadata")):
            return found
    return None


def _modified(file: Any) -> float | None:
    """When a path or an open file was written; None for anything else, which may raise any error that says so."""
    with contextlib.suppress(Exception):
        found = Path(file).stat() if isinstance(file, str | os.PathLike) else os.fstat(file.fileno())
        return found.st_mtime if stat.S_ISREG(found.st_mode) else None
    return None


def note_data_position() -> None:
    """Note that the script has set where the order of its samples continues."""
    global _data_position_set
    _data_position_set = True


def warn_of_data_restart(comm: Communicator) -> None:
    """Warn a resumed script once if its data begin at the first epoch again."""
    if _recording and _recording.resumed and not _data_position_set:
        note_data_position()
        comm.say(
            "this run was resumed, but its data begin again: with the first batch of epoch 0, and its order. Call "
            "loader.set_epoch(epoch) before each epoch, or save loader.state_dict() and load it "
            "(docs/resuming.md)"
        )


def end() -> None:
    """Record the energy drawn until this process's script ended, with or without an error. Called on every rank."""
    if _recording:
        _recording.end()


def stopped(reason: str) -> None:
    """Record that this process's script was stopped in good order. Called on every rank."""
    if _recording:
        _recording.stopped(reason)


def recording() -> Recording | None:
    """The recording of this process; None on ranks other than 0, and in forks of a rank."""
    global _recording
    if forks.is_fork():
        return None
    if _recording is None:
        launcher = detect()
        if launcher and launcher.rank:
            return None
        _recording = Recording()
    return _recording


def log(values: Mapping[str, Any] | None = None, /, *, step: int | None = None, **named: Any) -> None:
    """Record numbers of the training by name: ``ht.log(loss=loss, accuracy=accuracy)``.

    They become events of the run: curves in its report and in TensorBoard, rows of ``hpctrain status``, and the last of
    each name a metric of ``summary.json``. The newest are printed on rank 0's stderr, at most once a second; a script
    that was started by mpirun, torchrun or Python itself, without a run directory, only prints them.

    Not collective: only rank 0's values are recorded; other ranks may call it or not, and their values are dropped.
    Pass a loss or metric over all ranks' samples through :func:`hpctrain.mean` first, on every rank::

        ht.log(loss=ht.mean(loss, weight=len(x)))

    Args:
        values: numbers by name, for names that are not valid Python identifiers, such as ``{"test/loss": 0.3}``.
        step: the step that they belong to. By default the last one counted: a step of the first optimizer that was
            given to :func:`hpctrain.distribute`, in PyTorch and in Keras's ``fit``.
        named: further numbers by name.

    Raises:
        HpctrainError: no value, one that is not a single number, a name that is not a string, or a step that is not a
            count.
    """
    given = {**(values or {}), **named}
    if not given:
        raise HpctrainError("HT-log-nothing", "ht.log: nothing to record", "ht.log(loss=loss)")
    if step is not None and (type(step) is not int or not 0 <= step < LIMIT):
        raise HpctrainError(
            "HT-log-bad-step",
            "ht.log: step={step!r} is not a step number",
            "give an int from 0 up to 2**53 - 1",
            step=step,
        )
    if others := [name for name in given if not isinstance(name, str)]:
        raise HpctrainError(
            "HT-log-bad-name",
            "ht.log: the name {name!r} is not text",
            "give names as str: ht.log({'0': loss})",
            name=others[0],
        )
    if own := recording():
        own.log({name: _number(name, value) for name, value in given.items()}, step)


def _number(name: str, value: Any) -> float:
    try:
        # PyTorch warns where a loss that still has its graph becomes a number.
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise HpctrainError(
            "HT-log-not-one-number",
            "ht.log: {name} is not a single number: {kind}",
            "log its mean",
            name=name,
            kind=type(value).__name__,
        ) from error

"""Records a user's script as events of its run: its steps, counted automatically, and the values that it logs.

Rank 0 alone records, once per process. The other ranks record nothing, and nothing here is collective.
"""

from __future__ import annotations

import atexit
import operator
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.common.cluster.launcher import detect
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.events import Event, EventsFile, EventWriter
from hpctrain.common.run.events.kinds import ContinuedEvent, EnergyEvent, LogEvent, RunEvent, StepEvent, StoppedEvent
from hpctrain.common.stderr import tell
from hpctrain.worker.comm import Communicator, forks
from hpctrain.worker.comm.rank_run import run

if TYPE_CHECKING:
    from hpctrain.worker.energy_meter import HostMeter

# Values that are logged more often are recorded, but not printed.
_PRINT_SECONDS = 1.0
# The longest time whose energy a killed script may leave unrecorded.
_ENERGY_SECONDS = 300.0


class Recording:
    """Counts steps, records logged values, and prints the newest now and then.

    Args:
        path: the run's events; None for a script that was started without ``hpctrain run``.
        stopped_at: the step after which an earlier attempt was stopped last, 0 for none; None for the first attempt.
    """

    def __init__(self, path: Path | None = None, stopped_at: int | None = None) -> None:
        # Also of earlier attempts.
        self.steps = stopped_at or 0
        self.resumed = stopped_at is not None
        # The script has set where its data continue, or was warned that it has not.
        self.data_position_set = False
        # The next step does not follow the last one that was recorded.
        self._continues = self.resumed
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

    def step_done(self, learning_rate: float | None, *, gathered: int | None = None) -> None:
        """Count and record a step that ends now, and the bytes of rows that were gathered for it."""
        now = time.perf_counter()
        if self._continues:
            self._continues = False
            self._emit(ContinuedEvent(iteration=self.steps))
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

    def resumed_at(self, step: int) -> None:
        """Count on from this step.

        Raises:
            TypeError: it is no whole number.
        """
        self.steps, self._continues = operator.index(step), True

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
            tell(self._unprinted)
            self._printed_at, self._unprinted = time.monotonic(), ""


def begin(path: Path) -> None:
    """Record this process's script in the events of a run. Called on rank 0 before the script begins."""
    # The file may not exist yet: ranks that are started by hand may be the first to write it.
    events = EventsFile(path)
    stops = [event.iteration for event in events.few(StoppedEvent)]
    run.recording = Recording(path, max(stops, default=0) if events.has_steps else None)


def note_data_position() -> None:
    """Note that the script has set where the order of its samples continues."""
    if run.recording:
        run.recording.data_position_set = True


def warn_of_data_restart(comm: Communicator) -> None:
    """Warn a resumed script once if its data begin at the first epoch again."""
    if run.recording and run.recording.resumed and not run.recording.data_position_set:
        note_data_position()
        comm.say(
            "this run was resumed, but its data begin again: with the first batch of epoch 0, and its order. Call "
            "loader.set_epoch(epoch) before each epoch, or save loader.state_dict() and load it "
            "(docs/resuming.md)"
        )


def end() -> None:
    """Record the energy drawn until this process's script ended, with or without an error. Called on every rank."""
    if run.recording:
        run.recording.end()


def stopped(reason: str) -> None:
    """Record that this process's script was stopped in good order. Called on every rank."""
    if run.recording:
        run.recording.stopped(reason)


def recording() -> Recording | None:
    """The recording of this process; None on ranks other than 0, and in forks of a rank."""
    if forks.is_fork():
        return None
    if run.recording is None:
        launcher = detect()
        if launcher and launcher.rank:
            return None
        run.recording = Recording()
    recording: Recording = run.recording
    return recording


def resumed_at(step: int) -> None:
    """Say after which step a script goes on whose state was loaded: its events, curves and status count on from there.

    Called before the first step. Not collective: only rank 0's call counts. Without it a resumed script counts on from
    where it was last stopped by :func:`hpctrain.should_stop`, or from 0::

        state = torch.load("state.pt")
        model.load_state_dict(state["model"])
        ht.resumed_at(state["step"])

    Args:
        step: how many steps had been made when the state was saved.
    """
    if own := recording():
        own.resumed_at(step)


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
        HpctrainError: no value, or one that is not a single number.
        ValueError: a step that is no int from 0 on.
    """
    given = {**(values or {}), **named}
    if not given:
        raise HpctrainError("HT-argument-not-valid", "ht.log: nothing to record", "ht.log(loss=loss)")
    if own := recording():
        own.log({str(name): _number(name, value) for name, value in given.items()}, step)


def _number(name: str, value: Any) -> float:
    try:
        # PyTorch warns where a loss that still has its graph becomes a number.
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise HpctrainError(
            "HT-not-one-number",
            "ht.log: {name} is not a single number: {kind}",
            "log its mean",
            name=name,
            kind=type(value).__name__,
        ) from error

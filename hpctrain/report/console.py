"""The output of a run while it goes on: a progress bar on a terminal, and one plain line per epoch everywhere."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable
from typing import IO, Self, TextIO, cast

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from hpctrain.common.files.printable import printable
from hpctrain.common.run.events import Event
from hpctrain.common.run.events.kinds import (
    CheckpointEvent,
    EndEvent,
    EpochEvent,
    RunEvent,
    StartEvent,
    StepEvent,
    StoppedEvent,
)
from hpctrain.report.output import Patient, say
from hpctrain.report.record import StepTotals, event_line, iterations

# Steps over which the bar averages: enough to be calm, few enough to follow a change.
_WINDOW = 50


class Console:
    """Shows events as they come: the figures of epochs on ``stdout``, the rest on ``stderr``; and what a rank writes to
    either, as it comes.
    """

    def __init__(self, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self._stdout = stdout or sys.stdout
        self._stderr = stderr or sys.stderr
        self._bar: _Bar | None = None
        # The stream whose last line is one of the rank's that has no end yet.
        self._open: TextIO | None = None
        self._task = TaskID(0)
        self._run_event: RunEvent | None = None
        self._done = 0
        self._epoch_steps = StepTotals()
        self._newest: deque[StepEvent] = deque(maxlen=_WINDOW)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the progress bar from the terminal, and end the rank's last line. Idempotent."""
        if self._open and self._open.isatty():
            self._end_line(self._open)
        if self._bar:
            self._bar.stop()
            self._bar = None

    def show(self, event: Event) -> None:
        """Show one event; some kinds are not shown."""
        match event:
            case StartEvent():
                self._start(event)
            case RunEvent():
                self._run(event)
            case StepEvent():
                self._step(event)
            case EpochEvent():
                self._epoch(event)
            case CheckpointEvent():
                self._progress_line(f"checkpoint at step {event.iteration}{_next_checkpoint(event)}")
            case StoppedEvent():
                self._progress_line(event.text)
            case EndEvent():
                self.close()
                took = "" if event.seconds is None else f" after {event.seconds:.1f} s"
                self._progress_line(f"{event.status}{took}")
            case _ if text := event_line(event):
                self._progress_line(text)

    def output(self, text: str) -> None:
        """Print what a rank printed.

        Control characters pass: the program is the user's own, and may use colours.
        """
        self._pass_on(text, self._stdout)

    def _pass_on(self, text: str, stream: TextIO) -> None:
        if self._bar and stream.isatty():
            # Both streams are the one terminal: the bar's console prints above the bar instead of into it.
            self._bar.console.out(text.removesuffix("\n"), highlight=False)
        elif text:
            print(text, end="", file=Patient(stream), flush=True)
            self._open = None if text.endswith("\n") else stream

    def _end_line(self, stream: TextIO) -> None:
        """End the rank's line, if what is printed to a stream would go into it."""
        if self._open and (self._open is stream or (self._open.isatty() and stream.isatty())):
            self._pass_on("\n", self._open)

    def notice(self, text: str) -> None:
        """Print a message that the user has to see now."""
        self._progress_line(f"hpctrain: {text}")

    def _progress_line(self, text: str) -> None:
        # Trackers' threads call this too, while the bar may end.
        if bar := self._bar:
            bar.console.out(printable(text), highlight=False)
        else:
            self._end_line(self._stderr)
            say(text, self._stderr)

    def _start(self, event: StartEvent) -> None:
        self._done = event.iteration
        if event.attempt > 1:
            where = f"resumed at step {self._done}" if self._done else "begun again"
            self._progress_line(f"{where} (attempt {event.attempt})")

    def _run(self, event: RunEvent) -> None:
        self.close()
        self._run_event = event
        self._epoch_steps = StepTotals()
        self._newest.clear()
        if event.epochs is None or event.iterations_per_epoch is None:
            # A script prints its own progress.
            return
        ranks = "1 rank" if event.ranks == 1 else f"{event.ranks} ranks"
        epochs = "1 epoch" if event.epochs == 1 else f"{event.epochs} epochs"
        self._progress_line(
            f"{event.recipe}: {event.framework}, {event.backend}, {ranks}, "
            f"{event.parameters or 0:,} parameters, {epochs} of {event.iterations_per_epoch} steps"
        )
        if self._stderr.isatty() and os.environ.get("TERM") != "dumb":
            self._bar = _Bar(self._stderr)
            self._task = self._bar.add_task(
                "",
                total=iterations(event, self._done, event.epochs),
                completed=self._done,
                epoch=min(event.epochs, self._done // max(1, event.iterations_per_epoch)),
                epochs=event.epochs,
                detail="",
            )
            self._bar.start()

    def _step(self, event: StepEvent) -> None:
        if self._run_event and self._run_event.epochs is None:
            return
        self._epoch_steps.add(event)
        self._newest.append(event)
        if self._bar and self._run_event and event.epoch is not None:
            rate = "not finite" if event.learning_rate is None else f"{event.learning_rate:.3g}"
            detail = f"loss {_number(event.loss)}  rate {rate}  {self._speed(StepTotals(self._newest))}"
            total = iterations(self._run_event, event.iteration, event.epoch)
            self._bar.update(self._task, completed=event.iteration, total=total, epoch=event.epoch, detail=detail)

    def _epoch(self, event: EpochEvent) -> None:
        epochs = self._run_event.epochs if self._run_event else 0
        self._end_line(self._stdout)
        self._pass_on(
            f"epoch {event.epoch}/{epochs}  train loss {_number(event.train_loss)}  "
            f"test accuracy {_number(event.test_accuracy)}  {self._speed(self._epoch_steps)}".rstrip()
            + "\n",
            self._stdout,
        )
        self._epoch_steps = StepTotals()
        self._newest.clear()

    def _speed(self, steps: StepTotals) -> str:
        """The throughput and share of communication of the steps, where they were measured."""
        speed, share = steps.samples_per_s, steps.communication_share
        speeds = self._run_event.speeds(speed) if self._run_event else {}
        parts = [] if speed is None else [f"{speed:,.0f} samples/s"]
        if "tokens_per_s" in speeds:
            parts = [f"{speeds['tokens_per_s']:,.0f} tokens/s"]
        if "flops_utilisation" in speeds:
            parts.append(f"MFU {speeds['flops_utilisation']:.1%}")
        if share is not None:
            parts.append(f"comm {share:.0%}")
        return "  ".join(parts)


def _next_checkpoint(event: CheckpointEvent) -> str:
    """How long it is to the next checkpoint, and what that follows from, where the run chooses it."""
    if event.interval_seconds is None or event.mtbf_seconds is None:
        return ""
    return (
        f", the next after {event.interval_seconds:.3g} s: one holds up the training for "
        f"{event.blocked_seconds or 0:.2g} s, and failures are {event.mtbf_seconds / 3600:.3g} h apart"
    )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


class _Bar(Progress):
    """The progress bar, with the figures of the last steps in a row of their own, so that 60 columns are enough."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeRemainingColumn(compact=True),
            console=RichConsole(file=cast(IO[str], Patient(stream))),
            transient=True,
            expand=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield Text(task.fields["detail"], no_wrap=True, overflow="ellipsis")

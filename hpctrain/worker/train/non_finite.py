"""Handles steps whose numbers are not finite, and reports spikes of the loss.

The gradients of a step are checked between their reduction and the update. They are equal on all ranks then, so all
ranks leave out the same updates without a message; a loss that is not finite on one rank makes them not finite. The
recipe's rule is applied once the step is recorded, when the ranks have the mean loss anyway.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.regular import make_folder
from hpctrain.common.recipes.reliability import Numbers
from hpctrain.common.run.directory import write_json
from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.events.kinds import NonFiniteEvent, SpikeEvent
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data.sampling import Indices
from hpctrain.worker.train.checkpoint_saving import Checkpoints
from hpctrain.worker.train.trainer import GradientNumbers, Trainer

# How many losses the median is taken of that a spike is compared with.
_WINDOW = 64
_HINT = (
    "a lower learning_rate, a longer schedule.warmup_epochs or an optimizer.clip_norm may keep them finite; "
    "--set numbers.non_finite=skip or roll_back goes on without such steps"
)


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """A step that is done.

    Attributes:
        iteration, epoch: counted from 1.
        loss: the mean over all ranks.
        samples: this rank's own samples, as indices into the training set.
    """

    iteration: int
    epoch: int
    loss: float
    learning_rate: float
    samples: Indices


@dataclass(frozen=True, kw_only=True)
class _Fault:
    """A step with numbers that are not finite, and what this rank's trainer knows about it."""

    step: FinishedStep
    own_loss: float
    own_finite: bool
    gradients: Sequence[GradientNumbers]

    @property
    def parameters(self) -> list[str]:
        """The parameters whose gradients are not finite."""
        return [each.name for each in self.gradients if each.nan or each.inf]


class NonFiniteWatch:
    """Checks the numbers of each step of a run, and applies the recipe's rule.

    Args:
        dumps: the folder for the records of a step that ends the run.
    """

    def __init__(
        self,
        rules: Numbers,
        comm: Communicator,
        trainer: Trainer,
        checkpoints: Checkpoints,
        events: EventWriter,
        dumps: Path,
    ) -> None:
        self._rules = rules
        self._comm = comm
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._events = events
        self._dumps = dumps
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._fault: _Fault | None = None
        self._skipped = 0
        # The checkpoint that the run last went back to, and how many times in a row.
        self._returned = (0, 0)

    @property
    def recent(self) -> tuple[float, ...]:
        """The last finite losses, by which spikes are measured."""
        return tuple(self._recent)

    @property
    def skipped(self) -> int:
        """The number of consecutive steps left out so far."""
        return self._skipped

    @property
    def found(self) -> bool:
        """Whether :meth:`check` found a faulty step to which the rule is still to be applied."""
        return self._fault is not None

    def resume(self, recent: Sequence[float], skipped: int) -> None:
        """Continue with the values of these two that a checkpoint holds."""
        self._recent.extend(recent)
        self._skipped = skipped

    def check(self, step: FinishedStep) -> None:
        """Check a finished step. Sends no message."""
        if self._trainer.faulty or not math.isfinite(step.loss):
            self._fault = self._fault or _Fault(
                step=step,
                own_loss=self._trainer.loss,
                own_finite=self._trainer.own_finite,
                gradients=self._trainer.gradient_numbers(),
            )
            return
        self._skipped = 0
        median = statistics.median(self._recent) if len(self._recent) == _WINDOW else math.inf
        if self._rules.spike_factor and step.loss > self._rules.spike_factor * median:
            self._events.emit(SpikeEvent(iteration=step.iteration, epoch=step.epoch, loss=step.loss, median=median))
        self._recent.append(step.loss)

    def apply_rule(self, *, elsewhere: bool = False) -> None:
        """Apply the rule to a step that was found faulty, which is collective; do nothing without one.

        If a rank dies meanwhile, the rule is still to be applied.

        Args:
            elsewhere: some rank found one of its own steps faulty.

        Raises:
            HpctrainError: the rule ends the run. Exit code 1.
        """
        fault = self._fault
        if not (fault or elsewhere):
            return
        own_finite = fault is None or fault.own_finite
        # Ranks that found no fault describe that of another rank.
        everyone = self._comm.allgather_object((own_finite, self._comm.host, None if own_finite else fault))
        blamed = {rank: host for rank, (finite, host, _) in enumerate(everyone) if not finite}
        fault = fault or next(each for *_, each in everyone if each)
        if not (blamed or self._trainer.faulty):
            # When the other ranks died, only ranks without samples had done the step: its loss is unknown.
            self._fault = None
            return
        target, end = self._decide()
        dumped = ""
        if end is not None:
            dumped = self._dump(self._fault) if self._fault else "the named ranks dumped their gradients"
            # The run will be resumed from the checkpoint that is being written.
            self._checkpoints.wait()
        elif target:
            self._checkpoints.restore(target, self._trainer)
        else:
            self._trainer.undo_forward()
        # Agreed, so that the rule is applied on all ranks or on none.
        self._comm.agree()
        self._fault = None
        self._count_fault(target)
        parameters = fault.parameters
        self._events.emit(
            NonFiniteEvent(
                iteration=fault.step.iteration,
                epoch=fault.step.epoch,
                rule=self._rules.non_finite if end is None else "stop",
                ranks=tuple(sorted(blamed)),
                parameters=len(parameters),
                parameter=parameters[0] if parameters else None,
                to=target or None,
            )
        )
        if end is not None:
            raise _error(fault, blamed, end, f"{dumped}; {_HINT}")

    def _decide(self) -> tuple[int, str | None]:
        """The checkpoint to go back to, 0 for none; and why the run ends, None if it goes on."""
        limit = self._rules.limit
        if self._rules.non_finite == "stop":
            return 0, ""
        if self._rules.non_finite == "skip":
            return 0, f"; so were the {limit} steps before it (numbers.limit)" if self._skipped >= limit else None
        # After waiting, the newest checkpoint is the same on all ranks.
        self._checkpoints.wait()
        newest, (target, times) = self._checkpoints.newest, self._returned
        if not newest:
            return 0, "; there is no checkpoint yet to go back to"
        if newest == target and times >= limit:
            return 0, f"; the run has already gone back to step {newest} {times} times (numbers.limit)"
        return newest, None

    def _count_fault(self, target: int) -> None:
        before, times = self._returned
        if target:
            self._returned = (target, times + 1 if target == before else 1)
        else:
            self._skipped += 1

    def _dump(self, fault: _Fault) -> str:
        """Write this rank's record of the step; returns its path, or why it could not be written."""
        folder = self._dumps / f"step-{fault.step.iteration:08}"
        try:
            try:
                make_folder(folder)
            except OSError as error:
                raise disk_error(error, folder) from error
            write_json(folder / f"rank-{self._comm.rank}.json", self._record(fault))
        except HpctrainError as error:
            return error.message
        return f"{folder} has each rank's samples and gradients"

    def _record(self, fault: _Fault) -> dict[str, Any]:
        step = fault.step
        return {
            "iteration": step.iteration,
            "epoch": step.epoch,
            "rank": self._comm.rank,
            "host": self._comm.host,
            "loss": _json(fault.own_loss),
            "mean_loss": _json(step.loss),
            "learning_rate": step.learning_rate,
            "samples": step.samples.tolist(),
            "gradients": [{**asdict(each), "norm": _json(each.norm)} for each in fault.gradients],
        }


def mean_of_finite(losses: Sequence[float], sizes: Sequence[int]) -> float:
    """The mean loss over the samples of several steps, without losses that are not finite; NaN if none is left."""
    finite = np.isfinite(losses)
    return float(np.average(np.array(losses)[finite], weights=np.array(sizes)[finite])) if finite.any() else math.nan


def _error(fault: _Fault, blamed: dict[int, str], end: str, hint: str) -> HpctrainError:
    ranks = ", ".join(f"{rank} ({host})" for rank, host in blamed.items())
    names, step = fault.parameters, fault.step
    gradients = ""
    if names:
        gradients = f", and {len(names)} of {len(fault.gradients)} gradients are not finite, first {names[0]!r}"
    return HpctrainError(
        "HT-step-not-finite",
        "step {iteration} of epoch {epoch} has numbers that are not finite{where}: the mean loss is {loss:.4g}"
        "{gradients}{end}",
        hint,
        exit_code=1,
        iteration=step.iteration,
        epoch=step.epoch,
        where=f" on rank {ranks}" if blamed else "",
        ranks=sorted(blamed),
        loss=step.loss,
        gradients=gradients,
        parameters=names,
        end=end,
    )


def _json(value: float) -> float | str:
    """A number; nan, inf and -inf as text, because JSON has no word for them."""
    return value if math.isfinite(value) else str(value)

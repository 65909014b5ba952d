"""Handles steps whose numbers are not finite.

The gradients of a step are checked after their reduction. They are equal on all ranks then, so all ranks leave out the
same updates without a message, on a GPU by a flag there; a loss that is not finite on one rank makes them not finite.
The recipe's rule is applied once the step is recorded, when the ranks have the mean loss anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.reliability import Numbers
from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.events.kinds import NonFiniteEvent
from hpctrain.worker.comm import Communicator
from hpctrain.worker.train.checkpoint_saving import Checkpoints
from hpctrain.worker.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class _Fault:
    """A step with numbers that are not finite, and what this rank's trainer knows about it.

    Attributes:
        loss: the mean over all ranks.
        own_finite: whether this rank's own loss and gradients were finite.
    """

    iteration: int
    epoch: int
    loss: float
    own_finite: bool


class NonFiniteWatch:
    """Checks the numbers of each step of a run, and applies the recipe's rule.

    Attributes:
        skipped: the number of consecutive steps left out so far, which checkpoints hold.
    """

    def __init__(
        self, rules: Numbers, comm: Communicator, trainer: Trainer, checkpoints: Checkpoints, events: EventWriter
    ) -> None:
        self._rules = rules
        self._comm = comm
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._events = events
        self._fault: _Fault | None = None
        self.skipped = 0

    @property
    def found(self) -> bool:
        """Whether :meth:`check` found a faulty step to which the rule is still to be applied."""
        return self._fault is not None

    def check(self, iteration: int, epoch: int, loss: float) -> None:
        """Check a finished step, given its mean loss. Sends no message."""
        if math.isfinite(loss) and not self._trainer.faulty:
            self.skipped = 0
        elif self._fault is None:
            self._fault = _Fault(
                iteration=iteration,
                epoch=epoch,
                loss=loss,
                own_finite=self._trainer.own_finite,
            )

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
        skips = self._rules.non_finite == "skip" and self.skipped < self._rules.limit
        if skips:
            self._trainer.undo_forward()
        else:
            # The run will be resumed from the checkpoint that is being written.
            self._checkpoints.wait()
        # Agreed, so that the rule is applied on all ranks or on none.
        self._comm.agree()
        self._fault = None
        self.skipped += 1
        self._events.emit(
            NonFiniteEvent(
                iteration=fault.iteration,
                epoch=fault.epoch,
                rule="skip" if skips else "stop",
                ranks=tuple(sorted(blamed)),
            )
        )
        if not skips:
            raise self._error(fault, blamed)

    def _error(self, fault: _Fault, blamed: dict[int, str]) -> HpctrainError:
        ranks = ", ".join(f"{rank} ({host})" for rank, host in blamed.items())
        limit = f"; so were the {self._rules.limit} steps before it (numbers.limit)"
        return HpctrainError(
            "HT-step-not-finite",
            "step {iteration} of epoch {epoch} has numbers that are not finite{where}: the mean loss is {loss:.4g}"
            "{end}",
            "a lower learning_rate, a longer schedule.warmup_epochs or an optimizer.clip_norm may keep them finite; "
            "--set numbers.non_finite=skip goes on without such steps",
            exit_code=1,
            iteration=fault.iteration,
            epoch=fault.epoch,
            where=f" on rank {ranks}" if blamed else "",
            ranks=sorted(blamed),
            loss=fault.loss,
            end=limit if self._rules.non_finite == "skip" else "",
        )


def mean_of_finite(losses: Sequence[float], sizes: Sequence[int]) -> float:
    """The mean loss over the samples of several steps, without losses that are not finite; NaN if none is left."""
    finite = np.isfinite(losses)
    return float(np.average(np.array(losses)[finite], weights=np.array(sizes)[finite])) if finite.any() else math.nan

"""Continues without ranks that died, from the memory of the others, after the last step that any has done.

A rank notes a step once it has the mean loss of all, for which all had to do its update. So when ranks die, those that
are left have noted the same steps but for the last, and done the same updates but for the one after it.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpctrain.common.checkpoints.layout import OWN
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.reliability import FaultTolerance
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.events.kinds import RecoveredFaultEvent
from hpctrain.common.run.records import RankRecord, write_record
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.worker.comm import Communicator
from hpctrain.worker.comm.base import LostRank, RanksLostError
from hpctrain.worker.train.state import State
from hpctrain.worker.train.trainer import Trainer, TrainingStep

# MPI counts in 32 bits.
_PIECE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class _Account:
    """The progress of one rank.

    Attributes:
        noted: steps whose mean loss it has; ``loss`` is that of the last of them.
        updates: steps whose update it has done.
        step: after the noted ones, None before it began.
        loss_sum: of its own samples in that step, if it has done its update.
        faulty: whether numbers of the last of its updates were not finite.
    """

    noted: int
    loss: float
    updates: int
    step: TrainingStep | None
    loss_sum: float
    faulty: bool = False


@dataclass(frozen=True, kw_only=True)
class _Agreement:
    """The conclusion from the accounts of all ranks.

    Attributes:
        noted: steps that every rank has noted; some may have noted one more.
        updates: that every rank is to have done.
        source: the first rank that has; ``behind``, those that have not.
        loss: the mean loss of the last of these steps, for ranks that have not noted it.
        affected: samples that are missing in it.
        faulty: whether its numbers were not finite.
    """

    noted: int
    updates: int
    source: int
    behind: tuple[int, ...]
    loss: float
    affected: int
    faulty: bool


def reconcile(accounts: list[_Account]) -> _Agreement:
    """The furthest state of any rank, and the mean loss of its last step."""
    updates = max(account.updates for account in accounts)
    ahead = [rank for rank, account in enumerate(accounts) if account.updates == updates]
    known = [account.loss for account in accounts if account.noted == updates]
    loss, affected = known[0] if known else float("nan"), 0
    if not known:
        steps = [(accounts[rank].loss_sum, step) for rank in ahead if (step := accounts[rank].step)]
        seen = sum(step.own for _, step in steps)
        affected = steps[0][1].samples - seen
        loss = sum(loss_sum for loss_sum, _ in steps) / seen if seen else loss
    behind = tuple(rank for rank in range(len(accounts)) if rank not in ahead)
    noted = min(account.noted for account in accounts)
    return _Agreement(
        noted=noted,
        updates=updates,
        source=ahead[0],
        behind=behind,
        loss=loss,
        affected=affected,
        faulty=accounts[ahead[0]].faulty,
    )


def require_fault_tolerance(comm: Communicator, tolerance: FaultTolerance) -> None:
    """Refuse a fault-tolerant run where ranks could not continue without dead ones.

    Raises:
        HpctrainError: says what is missing.
    """
    if tolerance.fault_tolerant and comm.size > 1 and not comm.fault_tolerant:
        raise HpctrainError(
            f"fault_tolerance shrink cannot continue without a rank that died: {comm.lacks_for_fault_tolerance()}",
            "choose --backend mpi, with Open MPI 5; --set fault_tolerance=stop ends the run resumably instead",
        )


class Recovery:
    """Continues a training after ranks died.

    Args:
        comm: the ranks.
        trainer: of this rank.
        events: where faults are recorded; a new rank 0 takes them over.
        directory: of the run.
    """

    def __init__(self, comm: Communicator, trainer: Trainer, events: EventWriter, directory: RunDirectory) -> None:
        self._comm = comm
        self._trainer = trainer
        self._events = events
        self._directory = directory
        self._lost: list[LostRank] = []

    def concerns(self, error: Exception) -> bool:
        """Whether an error was caused by a rank's death, perhaps through code that changed its type.

        One that may have had a cause of its own is printed, for nobody raises it any more.
        """
        if isinstance(error, RanksLostError) or isinstance(error.__cause__, RanksLostError):
            return self._comm.fault_tolerant
        if not (self._comm.fault_tolerant and self._comm.lost):
            return False
        # The log may be on the disk that is full.
        with contextlib.suppress(OSError):
            print("hpctrain: treated as a consequence of a rank's death:", file=sys.stderr)
            traceback.print_exception(error)
        return True

    def go_on(self, noted: int, loss: float, step: TrainingStep | None) -> float | None:
        """Re-form the run, with every rank in the state of the one that was furthest.

        Args:
            noted: steps that this rank has noted, and ``loss``, that of the last.
            step: that it has begun after them.

        Returns:
            The loss of ``step``, which is done and to be noted; None if there is none to note.

        Raises:
            HpctrainError: it cannot be done.
        """
        begin = time.perf_counter()
        lost: list[LostRank] = []
        account = self._account(noted, loss, step)
        # Each turn has cost a rank its life.
        for _ in range(self._comm.size):
            try:
                lost += self._comm.recover()
                self._trainer.rebuild()
                agreement = reconcile(self._comm.allgather_object(account))
                account = self._caught_up(account, agreement)
                self._comm.agree()
            except Exception as error:
                if not self.concerns(error):
                    raise
            else:
                self._record(lost, time.perf_counter() - begin, agreement)
                return agreement.loss if agreement.updates > noted else None
        raise HpctrainError(
            f"rank {self._comm.rank} on {self._comm.host}: the remaining ranks could not agree how to continue",
            "hpctrain run --resume continues from the last checkpoint",
            exit_code=RESUMABLE,
        )

    def _account(self, noted: int, loss: float, step: TrainingStep | None) -> _Account:
        # The trainer's loss is a mean over the ranks' shares.
        loss_sum = self._trainer.loss * step.samples / step.ranks if step else 0.0
        return _Account(
            noted=noted,
            loss=loss,
            updates=self._trainer.updates,
            step=step,
            loss_sum=loss_sum,
            faulty=self._trainer.faulty,
        )

    def _caught_up(self, account: _Account, agreement: _Agreement) -> _Account:
        """Bring the ranks that are behind to where the others are; returns what this rank's account then is."""
        if not agreement.behind:
            return account
        state = self._received(agreement.source)
        if self._comm.rank not in agreement.behind:
            return account
        self._trainer.restore(state)
        self._trainer.updates = agreement.updates
        self._trainer.faulty = agreement.faulty
        # It has the update, but its own samples' part in the loss is not known: not to a further turn either.
        step = replace(account.step, own=0) if account.step else None
        return replace(account, updates=agreement.updates, step=step, loss_sum=0.0, faulty=agreement.faulty)

    def _received(self, source: int) -> State:
        """The state of another rank, but for what is a rank's own."""
        own: State = {}
        if self._comm.rank == source:
            everything = self._trainer.state()
            own = {name: everything[name] for name in everything if not name.startswith(OWN)}
        layout: list[tuple[str, Any, tuple[int, ...]]] = [(name, v.dtype, v.shape) for name, v in own.items()]
        state: State = {}
        for name, dtype, shape in self._comm.allgather_object(layout)[source]:
            state[name] = np.empty(shape, dtype)
            if own:
                state[name][...] = own[name]
            words = state[name].reshape(-1).view(np.uint8)
            for start in range(0, len(words), _PIECE_BYTES):
                self._comm.broadcast_bytes(words[start : start + _PIECE_BYTES], source)
        return state

    def _record(self, lost: list[LostRank], seconds: float, agreement: _Agreement) -> None:
        self._lost += lost
        if self._comm.rank == 0:
            self._events.take_over(self._directory.events)
            for each in self._lost:
                self._mark(each)
        for index, each in enumerate(lost):
            self._events.emit(
                RecoveredFaultEvent(
                    rank=each.first_rank,
                    host=each.host,
                    message=f"rank {each.first_rank} on {each.host} died",
                    iteration=agreement.noted + 1,
                    recovery_seconds=seconds,
                    samples_affected=0 if index else agreement.affected,
                    ranks=self._comm.size,
                )
            )
        names = ", ".join(f"rank {each.first_rank} on {each.host}" for each in lost)
        left = f"{self._comm.size} ranks continue" if self._comm.size > 1 else "the last rank continues"
        print(f"hpctrain: {names} died; {left} after {seconds:.3f} s", file=sys.stderr)

    def _mark(self, lost: LostRank) -> None:
        """Say in its record what became of a rank that cannot do so itself; a rank may die before it has one."""
        with contextlib.suppress(HpctrainError):
            record = read_model(self._directory.rank(lost.first_rank), RankRecord)
            if record.status == "running":
                update = {"status": "lost", "ended": time.time()}
                write_record(self._directory, record.model_copy(update=update))

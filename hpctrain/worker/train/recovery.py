"""Continues without ranks that died, from the memory of the others, after the last step that any of them has done.

A rank records a step once it has the mean loss of all ranks, for which all had to do the update. So when ranks die, the
remaining ones have recorded the same steps except the last, and done the same updates except the one after it.
"""

from __future__ import annotations

import contextlib
import time
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
from hpctrain.common.stderr import tell, tell_error
from hpctrain.worker.comm import Communicator
from hpctrain.worker.comm.base import LostRank, RanksLostError
from hpctrain.worker.train.state import State
from hpctrain.worker.train.trainer import Trainer, TrainingStep

# MPI's counts have 32 bits.
_PIECE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class _Account:
    """The progress of one rank.

    Attributes:
        recorded: the number of steps whose mean loss it has; ``loss`` is that of the last.
        updates: the number of steps whose update it has done.
        step: the step after the recorded ones; None before it began.
        loss_sum: the sum of its own samples' losses in that step, if it has done the update.
        faulty: whether numbers of its last update were not finite.
    """

    recorded: int
    loss: float
    updates: int
    step: TrainingStep | None
    loss_sum: float
    faulty: bool = False


@dataclass(frozen=True, kw_only=True)
class _Agreement:
    """The conclusion from the accounts of all ranks.

    Attributes:
        recorded: the number of steps that every rank has recorded; some may have recorded one more.
        updates: the number of updates that every rank has to have done.
        source: the first rank that has done them; ``behind`` are those that have not.
        loss: the mean loss of the last of these steps, for ranks that have not recorded it.
        affected: the number of samples that are missing in that step.
        faulty: whether that step's numbers were not finite.
    """

    recorded: int
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
    known = [account.loss for account in accounts if account.recorded == updates]
    loss, affected = known[0] if known else float("nan"), 0
    if not known:
        steps = [(accounts[rank].loss_sum, step) for rank in ahead if (step := accounts[rank].step)]
        seen = sum(step.own for _, step in steps)
        affected = steps[0][1].samples - seen
        loss = sum(loss_sum for loss_sum, _ in steps) / seen if seen else loss
    behind = tuple(rank for rank in range(len(accounts)) if rank not in ahead)
    recorded = min(account.recorded for account in accounts)
    return _Agreement(
        recorded=recorded,
        updates=updates,
        source=ahead[0],
        behind=behind,
        loss=loss,
        affected=affected,
        faulty=accounts[ahead[0]].faulty,
    )


def require_fault_tolerance(comm: Communicator, tolerance: FaultTolerance) -> None:
    """Refuse a fault-tolerant run whose ranks could not continue without dead ones.

    Raises:
        HpctrainError: they could not; the message says what is missing.
    """
    if tolerance.fault_tolerant and comm.size > 1 and not comm.fault_tolerant:
        raise HpctrainError(
            "HT-shrink-not-possible",
            "fault_tolerance shrink cannot continue without a rank that died: {reason}",
            "choose --backend mpi, with Open MPI 5; or --set fault_tolerance.lost_rank=stop, to end the run resumably",
            reason=comm.lacks_for_fault_tolerance(),
        )


class Recovery:
    """Continues a training after ranks died.

    Args:
        events: where faults are recorded; a new rank 0 continues the file.
    """

    def __init__(self, comm: Communicator, trainer: Trainer, events: EventWriter, directory: RunDirectory) -> None:
        self._comm = comm
        self._trainer = trainer
        self._events = events
        self._directory = directory
        self._lost: list[LostRank] = []

    def caused_by_lost_rank(self, error: Exception) -> bool:
        """Whether an error was caused by a rank's death, perhaps through code that changed its type.

        An error that may have had another cause is printed, because it is not raised again.
        """
        if isinstance(error, RanksLostError) or isinstance(error.__cause__, RanksLostError):
            return self._comm.fault_tolerant
        if not (self._comm.fault_tolerant and self._comm.lost):
            return False
        # The log may be on a full disk.
        with contextlib.suppress(OSError):
            tell("hpctrain: treated as a consequence of a rank's death:")
            tell_error(error)
        return True

    def continue_run(self, recorded: int, loss: float, step: TrainingStep | None) -> float | None:
        """Continue with the remaining ranks, all in the state of the one that was furthest.

        Args:
            recorded: the number of steps that this rank has recorded; ``loss`` is that of the last.
            step: the step that it has begun after them.

        Returns:
            The loss of ``step``, which is done and has to be recorded; None if there is none to record.

        Raises:
            HpctrainError: the remaining ranks could not agree.
        """
        begin = time.perf_counter()
        lost: list[LostRank] = []
        account = self._account(recorded, loss, step)
        # Each further attempt means that another rank has died.
        for _ in range(self._comm.size):
            try:
                lost += self._comm.recover()
                self._trainer.rebuild()
                agreement = reconcile(self._comm.allgather_object(account))
                account = self._catch_up(account, agreement)
                self._comm.agree()
            except Exception as error:
                if not self.caused_by_lost_rank(error):
                    raise
            else:
                self._record(lost, time.perf_counter() - begin, agreement)
                return agreement.loss if agreement.updates > recorded else None
        raise HpctrainError(
            "HT-run-not-re-formed",
            "rank {rank} on {host}: the remaining ranks could not agree how to continue",
            "hpctrain run --resume continues from the last checkpoint",
            exit_code=RESUMABLE,
            rank=self._comm.rank,
            host=self._comm.host,
        )

    def _account(self, recorded: int, loss: float, step: TrainingStep | None) -> _Account:
        # The trainer scales its loss so that the mean over the ranks is the batch's.
        loss_sum = self._trainer.loss * step.samples / step.ranks if step else 0.0
        return _Account(
            recorded=recorded,
            loss=loss,
            updates=self._trainer.updates,
            step=step,
            loss_sum=loss_sum,
            faulty=self._trainer.faulty,
        )

    def _catch_up(self, account: _Account, agreement: _Agreement) -> _Account:
        """Bring the ranks that are behind to the state of the others; returns this rank's new account."""
        if not agreement.behind:
            return account
        state = self._receive_state(agreement.source)
        if self._comm.rank not in agreement.behind:
            return account
        self._trainer.restore(state)
        self._trainer.updates = agreement.updates
        self._trainer.faulty = agreement.faulty
        # The rank has the update now, but the losses of its own samples stay unknown, also in a further attempt.
        step = replace(account.step, own=0) if account.step else None
        return replace(account, updates=agreement.updates, step=step, loss_sum=0.0, faulty=agreement.faulty)

    def _receive_state(self, source: int) -> State:
        """The state of another rank, without what is that rank's own. Collective."""
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
                self._mark_lost(each)
        for index, each in enumerate(lost):
            self._events.emit(
                RecoveredFaultEvent(
                    rank=each.first_rank,
                    host=each.host,
                    message=f"rank {each.first_rank} on {each.host} died",
                    iteration=agreement.recorded + 1,
                    recovery_seconds=seconds,
                    samples_affected=0 if index else agreement.affected,
                    ranks=self._comm.size,
                )
            )
        names = ", ".join(f"rank {each.first_rank} on {each.host}" for each in lost)
        left = f"{self._comm.size} ranks continue" if self._comm.size > 1 else "the last rank continues"
        tell(f"hpctrain: {names} died; {left} after {seconds:.3f} s")

    def _mark_lost(self, lost: LostRank) -> None:
        """Mark a dead rank as lost in its record, which may not exist yet."""
        with contextlib.suppress(HpctrainError):
            record = read_model(self._directory.rank(lost.first_rank), RankRecord)
            if record.status == "running":
                update = {"status": "lost", "ended": time.time()}
                write_record(self._directory, record.model_copy(update=update))

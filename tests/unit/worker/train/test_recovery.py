"""What the ranks that are left make of their accounts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from hpctrain.common.recipes.reliability import FaultTolerance
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventWriter
from hpctrain.worker.comm.base import LostRank, RanksLostError
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.train.recovery import Recovery, _Account, reconcile, require_fault_tolerance
from hpctrain.worker.train.state import State
from hpctrain.worker.train.trainer import TrainingStep
from support.refusals import refused


def account(recorded: int, updates: int, *, own: int = 5, loss_sum: float = 0.0, loss: float = 0.0) -> _Account:
    step = TrainingStep(samples=20, own=own, ranks=4, learning_rate=0.1, begin=0.0)
    return _Account(recorded=recorded, loss=loss, updates=updates, step=step, loss_sum=loss_sum)


def test_a_step_that_nobody_has_done_is_done_again() -> None:
    agreement = reconcile([account(7, 7, loss=0.5), account(7, 7, loss=0.5)])
    assert (agreement.recorded, agreement.updates, agreement.behind, agreement.affected) == (7, 7, (), 0)


def test_one_that_some_have_done_is_handed_to_the_others() -> None:
    agreement = reconcile([account(7, 7), account(7, 8, loss_sum=10.0), account(7, 8, own=4, loss_sum=17.0)])
    assert (agreement.recorded, agreement.updates, agreement.source, agreement.behind) == (7, 8, 1, (0,))
    # 9 of 20 samples are known to those that have done it
    assert (agreement.loss, agreement.affected) == (pytest.approx(3.0), 11)


def test_a_loss_that_one_rank_has_is_everybodys() -> None:
    agreement = reconcile([account(7, 8, loss_sum=1.0, loss=9.0), account(8, 8, loss=0.25), account(7, 7)])
    assert (agreement.recorded, agreement.updates, agreement.behind) == (7, 8, (2,))
    assert (agreement.loss, agreement.affected) == (0.25, 0)


def test_ranks_without_samples_do_not_make_up_a_loss() -> None:
    agreement = reconcile([account(7, 8, own=0), account(7, 8, own=0)])
    assert math.isnan(agreement.loss) and agreement.affected == 20


class FailsOnce(SingleCommunicator):
    """Rank 1 of 2, after the other, which hands it its state; then a third dies before all could agree."""

    backend = "mpi"
    rank, size, fault_tolerant = 1, 3, True
    accounts: ClassVar[list[_Account]]

    def recover(self) -> list[LostRank]:
        return []

    def allgather_object(self, value: Any) -> list[Any]:
        if not isinstance(value, _Account):
            return [[("weights", np.dtype("f4"), (2,))], value]
        self.accounts.append(value)
        return [account(7, 8, own=5, loss_sum=10.0), value]

    def broadcast_bytes(self, words: Any, source: int) -> None:
        words[:] = np.frombuffer(np.array([1, 2], "f4").tobytes(), np.uint8)

    def agree(self) -> None:
        if len(self.accounts) == 1:
            raise RanksLostError("HT-rank-died", "a rank died")


class Toy:
    updates, loss, faulty, own_finite = 7, 3.0, False, True
    restored: State

    def rebuild(self) -> None: ...

    def restore(self, state: State) -> None:
        self.restored = state


def test_a_rank_that_was_handed_an_update_has_no_part_in_its_loss_in_a_further_turn(tmp_path: Path) -> None:
    comm, toy = FailsOnce("test"), cast(Any, Toy())
    comm.accounts = []
    with EventWriter(None) as events:
        recovery = Recovery(comm, toy, events, RunDirectory(tmp_path))
        begun = account(7, 7).step
        loss = recovery.continue_run(7, 0.5, begun)
    assert toy.restored["weights"].tolist() == [1, 2]
    first, second = comm.accounts
    assert (first.updates, second.updates) == (7, 8)
    assert second.step is not None and (second.step.own, second.loss_sum) == (0, 0.0)
    assert loss == pytest.approx(2.0)


class Broken(FailsOnce):
    lost = True


def test_an_error_that_is_taken_for_a_death_is_on_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EventWriter(None) as events:
        toy, directory = cast(Any, Toy()), RunDirectory(tmp_path)
        broken, whole = (Recovery(kind("test"), toy, events, directory) for kind in (Broken, FailsOnce))
    assert broken.caused_by_lost_rank(RanksLostError("HT-rank-died", "rank 1 died")) and capsys.readouterr().err == ""
    assert broken.caused_by_lost_rank(MemoryError("no room"))
    said = capsys.readouterr().err
    assert said.startswith("hpctrain: ") and "MemoryError: " in said
    assert not whole.caused_by_lost_rank(MemoryError("no room"))


class Several(SingleCommunicator):
    backend = "horovod"
    size = 3


def test_what_cannot_go_on_without_a_rank_is_refused() -> None:
    with refused("HT-shrink-not-possible", reason="backend 'horovod' cannot"):
        require_fault_tolerance(Several("test"), FaultTolerance(lost_rank="shrink"))


def test_nothing_is_asked_of_a_run_that_stops_with_its_first_dead_rank_or_has_one_rank() -> None:
    require_fault_tolerance(Several("test"), FaultTolerance())
    require_fault_tolerance(SingleCommunicator("test"), FaultTolerance(lost_rank="shrink"))

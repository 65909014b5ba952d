"""Saving by several ranks: what they agree on, wait for, and find out when one dies. The ranks are threads."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.common.checkpoints.find import Newest, newest_whole
from hpctrain.common.checkpoints.keep import Policy
from hpctrain.common.checkpoints.layout import checkpoint_path, hidden, hidden_path, iterations, share_name
from hpctrain.common.checkpoints.publish import write_share
from hpctrain.common.errors import HpctrainError, TransientError
from hpctrain.common.run.events import EventWriter, read_events
from hpctrain.worker.adapters.guard import Guard
from hpctrain.worker.comm.base import RanksLostError
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.train import checkpoint_saving as saving
from hpctrain.worker.train.checkpoint_saving import Checkpoints
from hpctrain.worker.train.state import LazyState, State
from support import thread_ranks
from support.refusals import check
from support.thread_ranks import ThreadCommunicator
from support.written_checkpoints import filled, guard_over, progress_of, tensors_of, write_checkpoint


def on_ranks(count: int, work: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    """What ``work`` returns, or raises, on each."""

    def run(comm: ThreadCommunicator) -> Any:
        try:
            return work(comm)
        except Exception as error:
            return error

    return [*thread_ranks.on_ranks(count, run)]


def goes_on_alone(comm: ThreadCommunicator) -> None:
    comm.rank, comm.size = 0, 1
    comm._shared, comm._barrier = [None], threading.Barrier(1)


class Training:
    """Its state has three tensors of different sizes; it counts which of them became arrays."""

    before_update: Callable[[], None]

    def __init__(self, guard: Guard | None = None) -> None:
        self.guard = guard or guard_over()
        self.looked_up: list[str] = []

    def state(self) -> LazyState:
        def array(name: str, size: int) -> np.ndarray:
            self.looked_up.append(name)
            return np.full(size, size, np.uint8)

        sizes = {"model.a": 100, "model.b": 60, "model.c": 40, "random.x": 1}
        return LazyState({}, {name: (size, lambda n=name, s=size: array(n, s)) for name, size in sizes.items()})

    def restore(self, state: State) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("values", [(7, 7), (7, 8)], ids=["equal", "different"])
@pytest.mark.parametrize("updated", [True, False], ids=["ahead of the next update", "at the end"])
def test_what_differs_between_ranks_is_named_and_never_visible(
    tmp_path: Path, values: tuple[int, int], updated: bool
) -> None:
    def work(comm: ThreadCommunicator) -> None:
        training = Training(guard_over(values[comm.rank], comm))
        with Checkpoints(tmp_path, comm, EventWriter(None)) as checkpoints:
            checkpoints.save(progress_of(5, ranks=2), training)
            # Long enough for what is visible to be there.
            time.sleep(0.3)
            if updated:
                training.before_update()
            checkpoints.wait()

    errors = on_ranks(2, work)
    if values[0] == values[1]:
        assert errors == [None, None] and iterations(tmp_path) == [5]
        return
    for error in errors:
        assert isinstance(error, TransientError)
        check(error, "HT-parameters-differ", name="a", sides=[[0], [1]])
    assert iterations(tmp_path) == []


def test_each_rank_makes_arrays_of_its_share_alone(tmp_path: Path) -> None:
    def work(comm: ThreadCommunicator) -> list[str]:
        training = Training()
        with Checkpoints(tmp_path, comm, EventWriter(None)) as checkpoints:
            checkpoints.save(progress_of(5, ranks=2), training)
            checkpoints.wait()
        return training.looked_up

    assert [sorted(each) for each in on_ranks(2, work)] == [["model.a", "random.x"], ["model.b", "model.c", "random.x"]]
    found = tensors_of(checkpoint_path(tmp_path, 5))
    assert sorted(found) == ["model.a", "model.b", "model.c", "random.x.0", "random.x.1"]


def test_what_crashes_left_is_gone_before_anything_is_written(tmp_path: Path) -> None:
    """It may be what fills the disk."""
    write_share(hidden_path(checkpoint_path(tmp_path, 3), "died"), share(), 0, 2)
    hidden_path(checkpoint_path(tmp_path, 1), "deleted").mkdir()
    on_ranks(2, lambda comm: Checkpoints(tmp_path, comm, EventWriter(None)))
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_was_there_is_not_missing_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash in its deletion comes too late."""
    old = write_checkpoint(tmp_path, progress_of(3), {"model.a": np.zeros(3)})

    def crash(path: Path, **_: object) -> None:
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", crash)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, progress_of(3), {"model.a": np.ones(3)})
    assert newest_whole(tmp_path) == Newest(iteration=3)
    assert tensors_of(old)["model.a"].tolist() == [1, 1, 1]


def test_the_events_are_on_disk_ahead_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events_file, folder = tmp_path / "events.jsonl", tmp_path / "checkpoints"
    order: list[str] = []
    whole = os.fsync

    def note(descriptor: int) -> None:
        order.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        whole(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    with EventWriter(events_file) as events, Checkpoints(folder, SingleCommunicator("test"), events) as checkpoints:
        checkpoints.save(progress_of(3), Training())
        checkpoints.wait()
    assert order.index("events.jsonl") < order.index("state.json")
    # The name of the checkpoint, and that of the folder of all.
    assert order[-2:] == ["checkpoints", tmp_path.name]


def test_scores_of_rank_0_are_those_of_all(tmp_path: Path) -> None:
    """The best is kept by whoever is rank 0 later."""

    def work(comm: ThreadCommunicator) -> None:
        known = {1: 0.9, 2: 0.1, 3: 0.2} if comm.rank == 0 else {}
        checkpoints = Checkpoints(tmp_path, comm, EventWriter(None), policy=Policy(last=1, best=True), scores=known)
        comm.barrier()
        if comm.rank == 1:
            goes_on_alone(comm)
            checkpoints.save(progress_of(4), Training())
            checkpoints._finish()

    for iteration in (1, 2, 3):
        write_checkpoint(tmp_path, progress_of(iteration))
    on_ranks(2, work)
    assert iterations(tmp_path) == [1, 4]


def test_the_disk_decides_what_was_lost(tmp_path: Path) -> None:
    """Rank 0 dies once it has made the second of three visible, or not even that; the others have their shares."""
    for published, lost in ((True, False), (False, True)):
        folder = tmp_path / str(published)

        def work(
            comm: ThreadCommunicator, published: bool = published, folder: Path = folder
        ) -> tuple[bool, int] | None:
            events = EventWriter(None)
            checkpoints = Checkpoints(folder, comm, events)
            checkpoints.save(progress_of(4, ranks=2), Training())
            checkpoints.wait()
            if comm.rank == 0 and not published:
                return None
            checkpoints.save(progress_of(8, ranks=2), Training())
            checkpoints._finish()
            if comm.rank == 0:
                return None
            if published:
                until(lambda: 8 in iterations(folder))
            goes_on_alone(comm)
            with events:
                events.take_over(folder / "events.jsonl")
                return checkpoints.abandon(), checkpoints.newest

        assert on_ranks(2, work)[1] == (lost, 4 if lost else 8)
        assert hidden(folder) == []
        told = [event.iteration for event in read_events(folder / "events.jsonl")]
        assert told == ([] if lost else [8]), "the dead had not said so"


def test_what_is_there_when_another_rank_dies_is_told(tmp_path: Path) -> None:
    def work(comm: ThreadCommunicator) -> None:
        if comm.rank == 1:
            checkpoints = Checkpoints(tmp_path, comm, EventWriter(None))
            checkpoints.save(progress_of(4, ranks=2), Training())
            return
        with EventWriter(tmp_path / "events.jsonl") as events:
            checkpoints = Checkpoints(tmp_path, comm, events)
            checkpoints.save(progress_of(4, ranks=2), Training())
            until(lambda: 4 in iterations(tmp_path))
            goes_on_alone(comm)
            # Twice, as after two deaths.
            assert [checkpoints.abandon(), checkpoints.abandon()] == [False, False]

    assert on_ranks(2, work) == [None, None]
    assert [event.iteration for event in read_events(tmp_path / "events.jsonl")] == [4]


def test_a_death_ends_the_wait_for_the_shares(tmp_path: Path) -> None:
    def work(comm: ThreadCommunicator) -> None:
        checkpoints = Checkpoints(tmp_path, comm, EventWriter(None))
        if comm.rank == 0:
            checkpoints.save(progress_of(4, ranks=2), Training())
            threading.Timer(0.2, setattr, (comm, "lost", True)).start()
            try:
                checkpoints.wait()
            finally:
                checkpoints._abandoned.set()

    error, _ = on_ranks(2, work)
    assert isinstance(error, RanksLostError)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that does not answer until this is set."""
    answers = threading.Event()

    def write_share(*_: object, **__: object) -> None:
        answers.wait()
        raise HpctrainError("HT-of-test", "too late")

    monkeypatch.setattr(saving, "write_share", write_share)
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "0.5")
    yield answers
    answers.set()


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "ending"), [(0, Checkpoints.wait), (1, Checkpoints.abandon)])
def test_a_disk_that_does_not_answer_is_named(
    tmp_path: Path, stuck: threading.Event, rank: int, ending: Callable[[Checkpoints], object]
) -> None:
    def work(comm: ThreadCommunicator) -> None:
        checkpoints = Checkpoints(tmp_path, comm, EventWriter(None))
        if comm.rank == rank:
            checkpoints.save(progress_of(4, ranks=2), Training())
            ending(checkpoints)

    error = on_ranks(2, work)[rank]
    assert isinstance(error, HpctrainError)
    check(error, "HT-checkpoint-timed-out", rank=rank, seconds=0.45, state="written")
    path = Path(error.values["path"])
    assert (path.parent.parent, path.name) == (tmp_path, share_name(rank, 2))
    assert path.parent.name.startswith(".step-00000004.")
    assert error.exit_code == 4


def test_one_rank_alone_does_not_end_with_such_a_disk_either(tmp_path: Path, stuck: threading.Event) -> None:
    with Checkpoints(tmp_path, SingleCommunicator("test"), EventWriter(None)) as checkpoints:
        checkpoints.save(progress_of(4), Training())
    # Nor does Python wait for threads like this at its end.
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "checkpoint"] == [True]


def test_an_abandoned_one_deletes_nothing(tmp_path: Path) -> None:
    for iteration in (1, 2):
        write_checkpoint(tmp_path, progress_of(iteration))

    def work(comm: ThreadCommunicator) -> None:
        checkpoints = Checkpoints(tmp_path, comm, EventWriter(None), policy=Policy(last=1))
        if comm.rank == 0:
            checkpoints.save(progress_of(1, ranks=2), Training())
            goes_on_alone(comm)
            checkpoints.abandon()

    on_ranks(2, work)
    assert iterations(tmp_path) == [1, 2]


def share() -> saving.CheckpointShare:
    return filled({"model.a": np.zeros(3)})


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)

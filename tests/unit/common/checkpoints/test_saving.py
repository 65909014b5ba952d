"""Saving that goes wrong, or goes on while somebody reads."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpctrain.common.checkpoints import publish as publishing
from hpctrain.common.checkpoints.find import Newest, newest_whole
from hpctrain.common.checkpoints.keep import Policy
from hpctrain.common.checkpoints.layout import checkpoint_path, hidden, hidden_path, share_name
from hpctrain.common.checkpoints.publish import publish, write_share
from hpctrain.common.checkpoints.read import read_state
from hpctrain.common.checkpoints.share import CheckpointShare
from hpctrain.common.errors import TransientError
from hpctrain.common.run.events import EventWriter, read_events
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.train.checkpoint_saving import Checkpoints
from hpctrain.worker.train.state import LazyState, State
from support.refusals import refused
from support.written_checkpoints import filled, guard_over, progress_of


def share_of(value: float, rank: int = 0) -> CheckpointShare:
    return filled({f"model.{'abcd'[rank]}": np.full(3, value, np.float32)})


def test_ranks_whose_shares_never_come_are_named(tmp_path: Path) -> None:
    fresh = hidden_path(checkpoint_path(tmp_path, 5), "token")
    write_share(fresh, share_of(0), 1, 4)
    missing = ", ".join(share_name(rank, 4) for rank in (0, 2, 3))
    with refused("HT-checkpoint-timed-out", fresh=fresh, seconds=0.05, missing=missing) as caught:
        publish(fresh, progress_of(5, ranks=4), {}, threading.Event(), seconds=0.05)
    assert caught.value.exit_code == 4
    assert newest_whole(tmp_path) == Newest()


def test_each_share_that_comes_begins_the_limit_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: each look takes 4 s of the 10."""
    fresh = hidden_path(checkpoint_path(tmp_path, 5), "token")
    looks = iter(range(100))
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 4
        look = next(looks)
        if look % 2 == 0 and look // 2 < 4:
            write_share(fresh, share_of(0, look // 2), look // 2, 4)
        return now

    monkeypatch.setattr(publishing.time, "monotonic", clock)
    monkeypatch.setattr(publishing, "_POLL_SECONDS", 0.0)
    assert publish(fresh, progress_of(5, ranks=4), {}, threading.Event(), seconds=10.0)
    assert now > 10
    assert newest_whole(tmp_path) == Newest(iteration=5)


def test_shares_of_an_attempt_that_died_are_not_taken(tmp_path: Path) -> None:
    """The same step, by other ranks' numbers: what the first attempt left is neither waited for nor read."""
    path = checkpoint_path(tmp_path, 5)
    write_share(hidden_path(path, "first"), share_of(1), 1, 2)
    second = hidden_path(path, "second")
    write_share(second, share_of(2), 0, 2)
    with refused("HT-checkpoint-timed-out", missing=share_name(1, 2)):
        publish(second, progress_of(5, ranks=2), {}, threading.Event(), seconds=0.05)
    for rank in range(2):
        write_share(second, share_of(2, rank), rank, 2)
    publish(second, progress_of(5, ranks=2), {}, threading.Event(), seconds=0.05)
    _, state = read_state(path, 0, 2)
    assert state["model.a"].tolist() == [2, 2, 2]


PROOFS = [{"0,2": "a", "all": "c"}, {"1,3": "b", "all": "c"}, {"0,2": "a", "all": "c"}, {"1,3": "b", "all": "c"}]


@pytest.mark.parametrize("rank", [None, 0, 3])
@pytest.mark.parametrize("group", ["all", "own"])
def test_a_proof_that_differs_within_its_group_makes_nothing_visible(
    tmp_path: Path, rank: int | None, group: str
) -> None:
    fresh = hidden_path(checkpoint_path(tmp_path, 5), "token")
    proofs = [dict(proof) for proof in PROOFS]
    if rank is not None:
        proofs[rank]["all" if group == "all" else min(proofs[rank])] = "d"
    for each, proof in enumerate(proofs):
        write_share(fresh, share_of(0, each), each, 4, proof=lambda p=proof: p)
    if rank is None:
        assert publish(fresh, progress_of(5, ranks=4), {}, threading.Event(), seconds=10)
        return
    with refused("HT-parameters-differ") as caught:
        publish(fresh, progress_of(5, ranks=4), {}, threading.Event(), seconds=10)
    assert type(caught.value) is TransientError
    assert newest_whole(tmp_path) == Newest()


class Numbers:
    """A training whose state is its step."""

    before_update: Callable[[], None]

    def __init__(self, count: int = 1000) -> None:
        self.guard = guard_over()
        self.step = 0
        self.count = count

    def state(self) -> LazyState:
        return LazyState({"model.a": np.full(self.count, self.step, np.int64), "random.a": np.array([self.step])})

    def restore(self, state: State) -> None:
        self.step = int(state["random.a"][0])
        assert (state["model.a"] == self.step).all()


def checkpoints(folder: Path, events: Path | None = None, last: int = 1) -> Checkpoints:
    return Checkpoints(folder, SingleCommunicator("test"), EventWriter(events), policy=Policy(last=last))


def test_two_attempts(tmp_path: Path) -> None:
    folder, training = tmp_path / "checkpoints", Numbers()
    with checkpoints(folder, tmp_path / "events.jsonl") as first:
        for training.step in (1, 2):
            first.save(progress_of(training.step), training)
        first.wait()
        # It dies while it writes this one.
        write_share(hidden_path(checkpoint_path(folder, 3), "died"), share_of(3), 0, 1)
    with checkpoints(folder, tmp_path / "events.jsonl") as second:
        again = Numbers()
        assert second.restore(newest_whole(folder).iteration, again).iteration == again.step == 2
        again.step = 3
        second.save(progress_of(3), again)
        second.wait()
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
    events = [*read_events(tmp_path / "events.jsonl")]
    saved = [event.iteration for event in events]
    assert saved == [1, 2, 3]


def test_what_training_changes_behind_a_save_is_not_in_it(tmp_path: Path) -> None:
    training = Numbers()
    live = dict(training.state())
    training.state = lambda: LazyState(live)  # type: ignore[method-assign]
    with checkpoints(tmp_path) as saving:
        saving.save(progress_of(7), training)
        live["random.a"] += 9
        training.before_update()
        live["model.a"] += 9
        saving.wait()
    _, state = read_state(checkpoint_path(tmp_path, 7), 0, 1)
    assert {name: set(value.tolist()) for name, value in state.items()} == {"model.a": {0}, "random.a": {0}}


@pytest.mark.long
def test_a_reader_finds_a_whole_one_at_each_moment(tmp_path: Path) -> None:
    training, done = Numbers(), threading.Event()
    found: list[Newest] = []

    def read() -> None:
        while not done.is_set():
            found.append(newest_whole(tmp_path))

    with checkpoints(tmp_path) as saving:
        training.step = 1
        saving.save(progress_of(1), training)
        saving.wait()
        reader = threading.Thread(target=read)
        reader.start()
        try:
            for training.step in range(2, 60):
                saving.save(progress_of(training.step), training)
            saving.wait()
        finally:
            done.set()
            reader.join()
    assert found
    assert {each.damaged for each in found} == {()}
    steps = [each.iteration for each in found]
    assert steps == sorted(steps)
    assert steps[0] >= 1
    assert len(set(steps)) > 3


PLACES = {"share": ".safetensors", "receipt": ".part", "manifest": "state.json", "its hash": "state.sha256"}


@pytest.mark.parametrize("ending", PLACES.values(), ids=PLACES)
def test_a_disk_that_is_full_at_any_file_keeps_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Each way to write refuses at that file, as a full disk does; then there is space again."""
    training = Numbers()
    whole = os.open

    def full(path: str, flags: int, *arguments: object) -> int:
        if str(path).endswith(ending) and flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return whole(path, flags, *arguments)

    with checkpoints(tmp_path) as saving:
        saving.save(progress_of(1), training)
        saving.wait()
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", full)
            saving.save(progress_of(2), training)
            with refused("HT-disk-full") as caught:
                saving.wait()
        assert caught.value.exit_code == 1
        assert newest_whole(tmp_path) == Newest(iteration=1)
    with checkpoints(tmp_path) as saving:
        saving.save(progress_of(2), training)
        saving.wait()
    assert newest_whole(tmp_path) == Newest(iteration=2)
    assert hidden(tmp_path) == []

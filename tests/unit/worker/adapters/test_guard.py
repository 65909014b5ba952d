"""What the guard says of parameters that differ between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hpctrain.common.checkpoints.pieces import Box
from hpctrain.common.errors import TransientError
from hpctrain.worker.adapters.guard import Guard
from hpctrain.worker.comm.single import SingleCommunicator
from support.refusals import check, refused
from support.thread_ranks import ThreadCommunicator, on_ranks

DIFFER = "HT-parameters-differ"


def guarded_model(comm: ThreadCommunicator, every: int) -> tuple[Any, Guard]:
    """A small PyTorch model of the same numbers on all ranks, and its guard."""
    import torch

    from hpctrain.worker.adapters.torch.guarding import guard_over

    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(1.5)
        model.bias.zero_()
    return model, guard_over(comm, model.named_parameters(), every=every)


def told(check: Callable[[], Any]) -> dict[str, Any] | None:
    """The record of what a guard raises."""
    try:
        check()
    except TransientError as error:
        return error.record()
    return None


def found_in(parameters: list[dict[str, np.ndarray]]) -> dict[str, Any] | None:
    """What every rank's guard raises after its third step, which is the same on all of them."""

    def work(comm: ThreadCommunicator) -> dict[str, Any] | None:
        own = parameters[comm.rank]
        names = list(own)

        def checksums() -> Any:
            return np.array([int(own[name].view(f"u{own[name].itemsize}").sum(dtype=np.int64)) for name in names])

        guard = Guard(comm, names, checksums, every=3)
        mine, own = own, {name: np.zeros_like(value) for name, value in own.items()}
        guard.step_done()
        own = mine
        guard.step_done()
        return told(guard.step_done)

    found = on_ranks(len(parameters), work)
    assert all(each == found[0] for each in found)
    assert found[0] is None or (found[0]["code"], found[0]["exit_code"]) == (DIFFER, 1)
    return found[0]


def ranks_of(size: int, dtype: str = "f4") -> list[dict[str, np.ndarray]]:
    values = np.arange(12).reshape(3, 4).astype(dtype)
    return [{"stem.weight": values.copy(), "head.bias": values[0].copy()} for _ in range(size)]


def flip(array: np.ndarray, place: Any, bit: int) -> None:
    word = np.dtype(f"u{array.itemsize}")
    array.view(word)[place] ^= word.type(1 << bit)


@pytest.mark.parametrize(
    ("size", "flips", "values"),
    [
        (3, {(1, "head.bias")}, {"name": "head.bias", "odd": [1]}),
        (2, {(0, "stem.weight"), (0, "head.bias")}, {"name": "stem.weight", "sides": [[0], [1]], "odd": []}),
        (4, {(1, "head.bias"), (2, "head.bias")}, {"sides": [[0, 3], [1, 2]], "odd": []}),
    ],
)
def test_a_majority_is_right_if_there_is_one(size, flips, values):
    held = ranks_of(size)
    for rank, name in flips:
        flip(held[rank][name], 2 if name == "head.bias" else (1, 3), 30)
    check(found_in(held), DIFFER, step=3, **values)


END = ["none", "rank 0 loads others", "all ranks write the same", "a rank differed before", "it was collected before"]


@pytest.mark.parametrize("end", END)
def test_only_a_difference_that_training_made_is_an_error_at_the_end(end, capsys):
    torch = pytest.importorskip("torch")

    def work(comm: ThreadCommunicator) -> dict[str, Any] | None:
        model, guard = guarded_model(comm, every=100)
        guard.step_done()
        with torch.no_grad():
            model.bias.fill_(float(end == "a rank differed before" and comm.rank == 1))
        guard.step_done()
        if end == "rank 0 loads others" and comm.rank == 0:
            model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
        if end == "all ranks write the same":
            model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
        if end == "it was collected before":
            with torch.no_grad():
                model.bias.fill_(1.0 if comm.rank == 1 else 2.0)
            guard.updated()
            if comm.rank == 1:
                guard.release()
            else:
                guard.step_done()
        return told(guard.check_last)

    found = on_ranks(3, work)
    assert all(each == found[0] for each in found)
    assert (found[0] is not None) == (end == END[3])
    if found[0]:
        check(found[0], DIFFER, name="bias", odd=[1])
    assert ("not verified" in capsys.readouterr().err) == (end in (END[1], END[4]))


def pieces_on(ranks: list[dict[tuple[str, int], np.ndarray]], step: Callable[[Guard], Any]) -> list[Any]:
    """What each rank's guard raises of pieces: by name and first row, those that a rank holds."""

    def work(comm: ThreadCommunicator) -> dict[str, Any] | None:
        own = ranks[comm.rank]
        boxes = [Box((row, 0), each.shape) for (_, row), each in own.items()]
        held = list(own.values())

        def checksums() -> Any:
            return np.array([int(each.view(f"u{each.itemsize}").sum(dtype=np.int64)) for each in held], np.int64)

        guard = Guard(comm, [name for name, _ in own], checksums, every=1, boxes=boxes)
        return told(lambda: step(guard))

    return on_ranks(len(ranks), work)


def pieces_of(size: int) -> list[dict[tuple[str, int], np.ndarray]]:
    """As in hybrid sharding over two: of a matrix every second rank has the same half; of "norm" all have all."""
    whole = np.arange(24, dtype=np.float32).reshape(6, 4)
    return [
        {("stem", 3 * (rank % 2)): whole[3 * (rank % 2) :][:3].copy(), ("norm", 0): whole[:2].copy()}
        for rank in range(size)
    ]


def test_replicas_of_a_piece_are_compared_with_each_other():
    held = pieces_of(6)
    assert pieces_on(held, Guard.step_done) == [None] * 6
    flip(held[3]["stem", 3], (1, 2), 0)
    flip(held[3]["norm", 0], (0, 0), 0)
    # Of the first in the order of rank 0.
    for found in pieces_on(held, Guard.step_done):
        check(found, DIFFER, step=1, name="norm", odd=[3])
    flip(held[3]["norm", 0], (0, 0), 0)
    for found in pieces_on(held, Guard.step_done):
        check(found, DIFFER, step=1, name="stem", odd=[3])


def test_what_one_rank_alone_holds_is_not_compared():
    held = [{("stem", rank): np.full((1, 4), rank, np.float32)} for rank in range(3)]
    assert pieces_on(held, Guard.step_done) == [None] * 3
    held[0] = {}
    assert pieces_on(held, Guard.step_done) == [None] * 3


def test_ranks_that_are_apart_are_compared_when_they_meet() -> None:
    """By intent from step 2 to 4; after that they are equal, and once more after step 6 they are not."""

    def work(comm: ThreadCommunicator) -> list[Any]:
        own = np.zeros(1, np.int64)
        guard = Guard(comm, ["weight"], own.copy, every=2)
        guard.step_done()
        guard.apart = True
        own[:] = comm.rank
        for _ in range(3):
            guard.step_done()
        own[:] = 7
        guard.averaged()
        assert not guard.apart
        guard.step_done()
        own[:] = comm.rank
        # One step after the last comparison: not yet.
        guard.averaged()
        guard.apart = True
        guard.step_done()
        return guard.steps, told(guard.averaged)

    for steps, record in on_ranks(2, work):
        assert steps == 6
        check(record, DIFFER)


def test_numbers_that_are_not_finite_are_said_and_refused_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ["weight"]
    own = np.zeros(1, np.int64)
    guard = Guard(SingleCommunicator("test"), ["weight"], own.copy, every=2, not_finite=lambda: found[0])
    guard.require_finite()
    for _ in range(3):
        guard.step_done()
    assert capsys.readouterr().err.count("after step 1 parameter 'weight' has numbers that are NaN") == 1
    with refused("HT-parameters-not-finite", step=3, name="weight"):
        guard.require_finite()
    monkeypatch.setenv("HPCTRAIN_NOT_FINITE", "1")
    guard.require_finite()
    monkeypatch.delenv("HPCTRAIN_NOT_FINITE")
    # The script has gone back to what it saved.
    found[0] = ""
    guard.require_finite()

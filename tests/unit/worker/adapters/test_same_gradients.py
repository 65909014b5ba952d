"""Ranks that compute the same gradients are told so once, and no others."""

from __future__ import annotations

import pytest

from hpctrain.worker.comm.single import SingleCommunicator

torch = pytest.importorskip("torch")

from hpctrain.worker.adapters.torch.reducer import SameGradients  # noqa: E402

GRADIENTS = torch.tensor([0.1, -0.7, 3e-9, 0.0])


def said(passes, rank: int = 0, size: int = 7, **settings) -> list[str]:
    """What is said of passes with these gradients and means."""
    comm, texts = SingleCommunicator("test"), list[str]()
    comm.rank, comm.size, comm.say = rank, size, texts.append
    vars(comm).update(settings)
    same = SameGradients(comm)
    for own, mean in passes:
        same.before([own])
        same.after([mean])
    return texts


def test_equal_gradients_are_told_once():
    (text,) = said([(GRADIENTS, GRADIENTS.clone())] * 5)
    assert "ht.shard(loader)" in text


def test_a_mean_of_equal_numbers_may_be_rounded():
    total = GRADIENTS.clone()
    for _ in range(6):
        total += GRADIENTS
    assert len(said([(GRADIENTS, total / 7)] * 3)) == 1


@pytest.mark.parametrize(
    ("own", "mean"),
    [
        (GRADIENTS, GRADIENTS * (1 + 1e-5)),
        (GRADIENTS, GRADIENTS + torch.tensor([0, 0, 1e-9, 0])),
        (torch.zeros(4), torch.zeros(4)),
        (torch.full((4,), torch.nan), torch.full((4,), torch.nan)),
    ],
)
def test_others_are_not_told(own, mean):
    assert said([(GRADIENTS, GRADIENTS)] * 2 + [(own, mean)] + [(GRADIENTS, GRADIENTS)] * 5) == []


@pytest.mark.parametrize("settings", [{"rank": 1}, {"size": 1}, {"divides_batches": True}])
def test_other_ranks_single_ones_and_scripts_with_shard_say_nothing(settings):
    assert said([(GRADIENTS, GRADIENTS)] * 3, **settings) == []

"""Ranks that compute the same gradients are told so once, and no others."""

from __future__ import annotations

import pytest

from hpctrain.worker.comm.single import SingleCommunicator

torch = pytest.importorskip("torch")

from hpctrain.worker.adapters.torch.reducer import SameGradients  # noqa: E402

GRADIENTS = torch.tensor([0.1, -0.7, 3e-9, 0.0])


@pytest.mark.parametrize(
    ("mean", "settings", "times"),
    [
        (GRADIENTS, {}, 1),
        # A mean of equal numbers may be rounded.
        (sum([GRADIENTS] * 6, GRADIENTS) / 7, {}, 1),
        (GRADIENTS * (1 + 1e-5), {}, 0),
        (GRADIENTS + torch.tensor([0, 0, 1e-9, 0]), {}, 0),
        (torch.full((4,), torch.nan), {}, 0),
        (GRADIENTS, {"rank": 1}, 0),
        (GRADIENTS, {"size": 1}, 0),
        (GRADIENTS, {"divides_batches": True}, 0),
    ],
)
def test_equal_gradients_are_told_once(mean, settings, times):
    comm, texts = SingleCommunicator("test"), []
    comm.size, comm.say = 7, texts.append
    vars(comm).update(settings)
    same = SameGradients(comm)
    for found in (GRADIENTS, GRADIENTS, mean, *[GRADIENTS] * 3):
        same.before([GRADIENTS])
        same.after([found])
    assert len(texts) == times

"""Random numbers of ranks, some of which use CUDA already."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hpctrain.worker.comm.single import SingleCommunicator  # noqa: E402
from hpctrain.worker.train.torch_streams import part_streams  # noqa: E402


class _WithoutCuda(SingleCommunicator):
    """Rank 0 of two, the second of which has no state of CUDA's."""

    size = 2

    def allgather_object(self, value):
        return [value, (value[0] + 1, [b"seeded by the rank"])]


def test_cuda_that_some_ranks_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.ones(16, dtype=torch.uint8))
    before = torch.get_rng_state()
    part_streams(_WithoutCuda("test"))
    assert torch.equal(torch.get_rng_state(), before)

"""``ht.average_statistics``: the running statistics of all ranks, in models as users build them."""

from __future__ import annotations

import numpy as np
import pytest

import hpctrain as ht
from support.thread_ranks import on_ranks


def test_running_statistics_of_any_normalisation_become_the_mean_over_the_ranks():
    torch = pytest.importorskip("torch")

    def model():
        return torch.nn.ModuleList(
            [
                torch.nn.BatchNorm1d(3),
                torch.nn.InstanceNorm1d(3, track_running_stats=True),
                torch.nn.BatchNorm1d(3, track_running_stats=False),
                torch.nn.BatchNorm1d(3, momentum=None),
            ]
        )

    def work(comm):
        own = model()
        x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(comm.rank))
        for norm in own:
            norm(x)
        before = {name: buffer.clone() for name, buffer in own.named_buffers()}
        ht.average_statistics(own, comm=comm)
        return before, dict(own.named_buffers())

    befores, afters = zip(*on_ranks(3, work), strict=True)
    names = [name for name in befores[0] if "running" in name]
    assert len(names) == 6
    for name in names:
        wanted = np.mean([before[name].double().numpy() for before in befores], axis=0)
        assert not np.allclose(befores[0][name], wanted, rtol=1e-3)
        for after in afters:
            np.testing.assert_array_equal(after[name].numpy(), wanted.astype(np.float32))

"""``nn.SyncBatchNorm`` over the ranks."""

from __future__ import annotations

import numpy as np
import pytest

from support.thread_ranks import on_ranks

torch = pytest.importorskip("torch")

from hpctrain.worker.adapters.torch.synced_batch_norm import synchronise_batch_norms  # noqa: E402
from hpctrain.worker.adapters.torch.trainable import Divided, add_modules  # noqa: E402


@pytest.mark.parametrize("sizes", [(5, 3), (8, 0), (3, 3, 2)])
def test_gradients_are_those_of_one_process(sizes):
    """Each rank has the number of ranks times the true gradient of its rows, and parameters the mean over the ranks."""
    x, wanted = torch.randn(8, 3, dtype=torch.double), torch.randn(8, 3, dtype=torch.double)

    def gradients(norm, rows, target, ranks):
        rows = rows.clone().requires_grad_()
        (norm(rows) * target).sum().mul(ranks).backward()
        return [rows.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var]

    def work(comm):
        norm = torch.nn.Sequential(torch.nn.SyncBatchNorm(3)).double()
        synchronise_batch_norms(comm, norm)
        add_modules(norm, Divided(comm, norm))
        own = slice(sum(sizes[: comm.rank]), sum(sizes[: comm.rank + 1]))
        return gradients(norm[0], x[own], wanted[own], comm.size)

    everyone = on_ranks(len(sizes), work)
    rows, weight, bias, mean, variance = gradients(torch.nn.BatchNorm1d(3).double(), x, wanted, 1)
    np.testing.assert_allclose(torch.cat([each[0] for each in everyone]) / len(sizes), rows, atol=1e-12)
    for place, one in enumerate((weight, bias), start=1):
        np.testing.assert_allclose(sum(each[place] for each in everyone) / len(sizes), one, atol=1e-12)
    for each in everyone:
        np.testing.assert_allclose(each[3], mean, atol=1e-12)
        np.testing.assert_allclose(each[4], variance, atol=1e-12)

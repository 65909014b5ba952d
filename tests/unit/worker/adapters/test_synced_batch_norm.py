"""``nn.SyncBatchNorm`` over the ranks."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.worker.comm.base import Group
from support.thread_ranks import ThreadCommunicator, on_ranks

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from hpctrain.worker.adapters.torch.synced_batch_norm import synchronise_batch_norms  # noqa: E402
from hpctrain.worker.adapters.torch.trainable import Divided, add_modules  # noqa: E402


class _All(Group):
    """The ranks that there are when it is formed."""

    def __init__(self, comm):
        self.comm, self.size = comm, comm.size

    def allreduce(self, array):
        assert self.size == self.comm.size, "of ranks that died"
        return self.comm.allreduce(array, "sum")


class Ranks(ThreadCommunicator):
    def group(self, size=None, what=""):
        return _All(self)


def x_of(rank):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def model_of(comm):
    model = torch.nn.Sequential(torch.nn.SyncBatchNorm(3, momentum=None))
    synchronise_batch_norms(comm, model)
    add_modules(model, Divided(comm, model))
    return model


def on(size, work):
    return on_ranks(size, lambda comm: work(Ranks(comm.rank, comm._shared, comm._barrier)))


class Reads(TorchDispatchMode):
    """Counts the values that Python reads from tensors, for each of which a GPU would be waited for."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += operation is torch.ops.aten._local_scalar_dense.default
        return operation(*args, **kwargs or {})


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_step_reads_no_value_of_a_tensor(momentum):
    def work(comm):
        model = model_of(comm)
        model[0].momentum = momentum
        with Reads() as reads:
            model(x_of(comm.rank)).square().sum().backward()
        return reads.count

    assert on(2, work) == [0, 0]


def test_the_ranks_that_are_left_normalise_together():
    def work(comm):
        model = model_of(comm)
        model(x_of(comm.rank))
        comm.barrier()
        if comm.rank:
            return None
        # What recover() leaves of it.
        comm.size, comm.allreduce = 1, lambda array, _: array
        comm._kept_groups.clear()
        return model(x_of(0))

    x = x_of(0)
    wanted = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()
    np.testing.assert_allclose(on(2, work)[0].detach(), wanted, atol=1e-5)


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

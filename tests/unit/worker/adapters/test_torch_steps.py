"""Which optimizers update parameters whose gradients nobody reduces."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hpctrain.worker.adapters.torch.steps import _is_reduced_by_others  # noqa: E402
from hpctrain.worker.comm.single import SingleCommunicator  # noqa: E402


def test_gradients_that_distributed_data_parallel_reduces():
    SingleCommunicator("alone").process_group()
    try:
        inner, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        outer = torch.nn.parallel.DistributedDataParallel(inner)
        optimizer = torch.optim.SGD(inner.parameters(), 0.1)
        assert _is_reduced_by_others(optimizer, list(inner.parameters()))
        assert not _is_reduced_by_others(optimizer, [*inner.parameters(), *other.parameters()])
        del outer
    finally:
        torch.distributed.destroy_process_group()
    assert not _is_reduced_by_others(optimizer, list(other.parameters()))

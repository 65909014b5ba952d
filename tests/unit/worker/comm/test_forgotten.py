"""The hint at the end of a script whose ranks trained each by itself."""

from __future__ import annotations

import sys
import types
import weakref

import pytest

from hpctrain.worker import comm
from hpctrain.worker.comm import forgotten
from hpctrain.worker.comm.forgotten import forgotten_calls

BASE = "keras.src.optimizers.base_optimizer"


@pytest.fixture
def optimizers(monkeypatch):
    """Keras's class of optimizers, of which none is there yet."""

    class BaseOptimizer:
        iterations = 0

    monkeypatch.delitem(sys.modules, "torch.optim.optimizer", raising=False)
    monkeypatch.setitem(sys.modules, BASE, types.SimpleNamespace(BaseOptimizer=BaseOptimizer))
    return BaseOptimizer


def test_a_used_optimizer_is_found_beside_objects_that_are_gone(optimizers):
    gone = optimizers()
    proxies = [weakref.proxy(gone)]
    del gone
    assert forgotten_calls(2, joined=True, distributed=False) is None
    used = optimizers()
    used.iterations = 3
    assert forgotten_calls(2, joined=True, distributed=False)
    assert len(proxies) == 1


def test_a_hint_that_cannot_be_had_ends_nothing(optimizers, monkeypatch):
    unfinished = optimizers()
    unfinished.iterations = None
    monkeypatch.setattr(comm, "_joined", True)
    monkeypatch.setattr(comm, "_distributed", False)
    comm.mention_forgotten(0, 2)


def groups(*, made: bool) -> types.SimpleNamespace:
    return types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: made)


def test_who_may_have_built_on_the_default_group_has_not_failed(optimizers, monkeypatch):
    used = optimizers()
    used.iterations = 3
    found = forgotten_calls(2, joined=True, distributed=False)
    assert found and found.alone
    # Neither a reduction by mpi4py or Horovod nor DDP on the group that ht.init() made can be told apart from none.
    assert not forgotten_calls(2, joined=True, distributed=False, others=True).alone
    monkeypatch.setitem(sys.modules, "torch.distributed", groups(made=True))
    assert forgotten_calls(2, joined=False, distributed=False) is None
    found = forgotten_calls(2, joined=True, distributed=False)
    assert found and not found.alone
    monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
    assert forgotten_calls(2, joined=True, distributed=False) is None
    monkeypatch.setitem(sys.modules, "torch.distributed", groups(made=False))
    assert forgotten_calls(2, joined=True, distributed=False)


def test_mpi_that_hpctrain_itself_imports_says_nothing_of_the_script(monkeypatch):
    monkeypatch.setattr(forgotten, "_OTHERS", ["mpi4py.MPI"])
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.ModuleType("mpi4py.MPI"))
    assert forgotten.others_imported()
    forgotten.ignore_import("mpi4py.MPI")
    forgotten.ignore_import("mpi4py.MPI")
    assert not forgotten.others_imported()

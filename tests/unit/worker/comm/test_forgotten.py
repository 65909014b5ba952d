"""Whether the ranks of a script have trained each by itself."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from hpctrain.worker.comm import forgotten

# Printed is whether a rank of two is told something, if the script never joined and if it called ht.init().
HEAD = """
from hpctrain.worker.comm import forgotten
forgotten.watch()
def told():
    calls = [forgotten.forgotten_calls(2, joined=joined, distributed=False) for joined in (False, True)]
    print([call is not None for call in calls])
"""
# tests/mpi/test_forgotten.py has the same with PyTorch.
SCRIPT = """import keras, numpy
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = numpy.ones((8, 2)), numpy.ones((8, 1))
model.evaluate(x, y, verbose=0)
told()
model.fit(x, y, verbose=0)
told()
"""


def test_a_rank_trains_alone_from_its_first_step_on(tmp_path):
    pytest.importorskip("keras")
    done = subprocess.run(
        [sys.executable, "-c", HEAD + SCRIPT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["[False, False]", "[True, True]"]


def groups(*, size: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: size > 0, get_world_size=lambda: size
    )


@pytest.mark.parametrize("sign", ["group", "own group", "library", "TF_CONFIG", "meant"])
def test_who_knows_the_other_ranks_is_told_nothing(monkeypatch, sign):
    # Other tests of this process may have made groups.
    monkeypatch.setattr(forgotten._signs, "trained", True)
    monkeypatch.setattr(forgotten._signs, "has_own_group", False)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("HPCTRAIN_RANKS_ALONE", raising=False)
    monkeypatch.setitem(sys.modules, "torch.distributed", groups(size=0))
    for name in forgotten._OTHERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert forgotten.forgotten_calls(2, joined=False, distributed=False)
    if sign == "group":
        monkeypatch.setitem(sys.modules, "torch.distributed", groups(size=2))
    elif sign == "own group":
        monkeypatch.setattr(forgotten._signs, "has_own_group", True)
    elif sign == "library":
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.ModuleType("mpi4py.MPI"))
    elif sign == "TF_CONFIG":
        monkeypatch.setenv("TF_CONFIG", "{}")
    else:
        monkeypatch.setenv("HPCTRAIN_RANKS_ALONE", "1")
    assert forgotten.forgotten_calls(2, joined=False, distributed=False) is None


def test_mpi_that_hpctrain_itself_imports_says_nothing_of_the_script(monkeypatch):
    monkeypatch.setattr(forgotten, "_OTHERS", ["mpi4py.MPI"])
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.ModuleType("mpi4py.MPI"))
    assert forgotten.others_imported()
    forgotten.ignore_import("mpi4py.MPI")
    forgotten.ignore_import("mpi4py.MPI")
    assert not forgotten.others_imported()

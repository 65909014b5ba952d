"""Whether the ranks of a script have trained each by itself."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist

from hpctrain.worker.comm import forgotten, torch_distributed

# Each of CASES is done in a fork of its own, by names of the program. Printed is what a rank of two is told at its
# end, if the script never joined and if it called ht.init(), and how often it was told something at its steps.
PYTORCH = """
import os, sys, types
from hpctrain.worker.comm import forgotten
said = []
forgotten.watch(lambda: said.append(None))
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

def optimizer(kind):
    found = kind([torch.zeros(2, requires_grad=True)], lr=0.1)
    found.param_groups[0]["params"][0].grad = torch.ones(2)
    return found

def steps():
    own = optimizer(torch.optim.SGD)
    own.step(), own.step()

def by_hand(trained, update, steps=3):
    for _ in range(steps):
        loss = sum(torch.sum(each * torch.arange(1.0, 1 + each.numel()).reshape(each.shape)) for each in trained)
        loss.backward()
        with torch.no_grad():
            for each in trained:
                update(each)
                each.grad = None

def subtract(each):
    each -= 0.1 * each.grad

def store(name, processes):
    return dist.FileStore(name, processes)

def told():
    alone = [forgotten.forgotten_calls(2, joined=joined, distributed=False) for joined in (False, True)]
    print([found and found.alone for found in alone], len(said), flush=True)

for number, case in enumerate(sys.argv[1:]):
    if not os.fork():
        exec(case)
        told()
        os._exit(0)
    assert os.wait()[1] == 0
"""
CASES = {
    "pass": "[False, None] 0",
    "kept = optimizer(torch.optim.AdamW)": "[False, None] 0",  # for an evaluation
    "model = torch.nn.Linear(2, 2); get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))": (
        "[False, None] 0"  # it makes a step of its own, without effect
    ),
    "steps()": "[True, True] 1",
    "own = optimizer(torch.optim.AdamW); own.zero_grad(); own.step(), own.step()": "[False, None] 0",
    "own = optimizer(torch.optim.SGD); own.param_groups[0]['lr'] = 0.0; own.step(), own.step()": "[False, None] 0",
    "by_hand([*torch.nn.Linear(2, 2).parameters()], lambda each: None)": "[False, None] 0",
    "by_hand([*torch.nn.Linear(2, 2).parameters()], subtract)": "[True, True] 1",
    "by_hand([*torch.nn.Linear(2, 2).parameters()], lambda each: each.data.add_(each.grad, alpha=-0.1))": (
        "[True, True] 1"
    ),
    "by_hand([*torch.nn.Linear(2, 2).parameters()], subtract, steps=1)": "[False, None] 0",
    "by_hand([torch.zeros(3, requires_grad=True)], subtract)": "[True, True] 1",
    # An adversarial sample for a model.
    "model = torch.nn.Linear(2, 2); by_hand([torch.zeros(3, requires_grad=True)], subtract)": "[False, None] 0",
    # Of several checkpoints, by their gradients.
    """model = torch.nn.Linear(2, 2)
for value in range(4):
    model.load_state_dict({"weight": torch.full((2, 2), float(value)), "bias": torch.zeros(2)})
    model(torch.ones(1, 2)).sum().backward()""": "[False, None] 0",
    # Of a model whose state a copy loads after each update.
    """model, target = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
def update(each):
    subtract(each)
    target.load_state_dict(model.state_dict())
by_hand([*model.parameters()], update)""": "[True, True] 1",
    # By FSDP, which frees the memory of parameters between their uses.
    """freed = torch.nn.Parameter(torch.ones(1000))
loss = (2 * freed).sum()
freed.untyped_storage().resize_(0)
loss.backward()""": "[False, None] 0",
    # Of few rows among many.
    """table = torch.nn.Embedding(1000, 64)
own = torch.optim.SGD(table.parameters(), lr=0.1)
for _ in range(2):
    table(torch.tensor([500])).sum().backward()
    own.step()""": "[True, True] 1",
    # Of views into memory of several kinds, where they begin at any element.
    """memory = torch.zeros(7, dtype=torch.float64)
own = torch.optim.SGD([torch.nn.Parameter(memory[1:3]), torch.nn.Parameter(memory[3:7].view(2, 2).T)], lr=0.1)
for _ in range(2):
    own.param_groups[0]["params"][1].grad = torch.ones(2, 2, dtype=torch.float64)
    own.step()""": "[True, True] 1",
    # By autograd.grad(), of a model without a bias in 16 bits.
    """model = torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
for _ in range(3):
    (found,) = torch.autograd.grad(model(torch.ones(1, 2, dtype=torch.bfloat16)).sum(), model.parameters())
    model.weight.data -= found""": "[True, True] 1",
    # Micro-batches.
    """model = torch.nn.Linear(2, 2)
for number in range(40):
    model(torch.ones(1, 2)).sum().backward()
    if number % 16 == 15:
        with torch.no_grad():
            model.bias -= model.bias.grad""": "[True, True] 1",
    "kept = store('a', 1); steps()": "[True, True] 1",
    # By a bare ProcessGroupGloo, by torch.distributed.rpc, or by the store itself.
    "kept = store('b', 2); steps()": "[None, True] 1",
    "kept = dist.FileStore(file_name='d', world_size=1); steps()": "[True, True] 1",
    "kept = dist.FileStore(file_name='e', world_size=2); steps()": "[None, True] 1",
    "dist.init_process_group('gloo', store=store('c', 1), rank=0, world_size=1); steps()": "[True, True] 1",
    "sys.modules['mpi4py.MPI'] = types; steps()": "[None, True] 1",
}
KERAS = """
from hpctrain.worker.comm import forgotten
forgotten.watch(lambda: None)
import keras, numpy
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
# As of a model that is loaded: its optimizer has made steps, but not in this process.
model.optimizer.build(model.trainable_variables)
model.optimizer.iterations.assign(5)
x, y = numpy.ones((8, 2)), numpy.ones((8, 1))
model.evaluate(x, y, verbose=0)
print(forgotten.forgotten_calls(2, joined=True, distributed=False))
model.fit(x, y, verbose=0)
print(forgotten.forgotten_calls(2, joined=True, distributed=False).alone)
"""
# Each of PROCESS_CASES is what a rank of two does; printed is whether its processes have trained without the other's.
PROCESSES = """
import functools, os, sys
from hpctrain.worker.comm import forgotten, own_processes
if __name__ == "__main__":
    forgotten.watch(lambda: None)
    own_processes.watch()
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def train(rank, store, processes):
    kept = dist.FileStore(store, processes)
    model = torch.nn.Linear(2, 2)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        own.step()

def forked(what, *arguments):
    mine = [mp.get_context("fork").Process(target=what, args=(rank, *arguments)) for rank in range(2)]
    for each in mine:
        each.start()
    for each in mine:
        each.join()

class Own(mp.get_context("fork").Process):
    def __init__(self, *arguments):
        super().__init__()
        self.arguments = arguments

    def run(self):
        train(*self.arguments)

class Spawned(mp.get_context("spawn").Process):
    run, __init__ = Own.run, lambda self, *arguments: (mp.get_context("spawn").Process.__init__(self), setattr(
        self, "arguments", arguments))[0]

def of_classes(kind, *arguments):
    mine = [kind(rank, *arguments) for rank in range(2)]
    for each in mine:
        each.start()
    for each in mine:
        each.join()
        assert each.exitcode == 0

def pooled():
    import joblib
    assert joblib.Parallel(n_jobs=2)(joblib.delayed(abs)(each) for each in (-1, 1)) == [1, 1]
    joblib.externals.loky.get_reusable_executor().shutdown()

if __name__ == "__main__":
    for case in sys.argv[1:]:
        if not os.fork():
            eval(case)
            found = [forgotten.forgotten_calls(2, joined=joined, distributed=False) for joined in (False, True)]
            print([each and each.alone for each in found], flush=True)
            os._exit(0)
        assert os.wait()[1] == 0
"""
PROCESS_CASES = {
    "mp.spawn(train, ('spawned', 2), nprocs=2)": "[True, True]",
    "forked(train, 'two', 2)": "[True, True]",
    "forked(train, 'one', 1)": "[True, True]",
    # Two of them are another rank's.
    "forked(train, 'four', 4)": "[False, None]",
    "forked(functools.partial(train, processes=2), 'partial')": "[True, True]",
    "forked(print)": "[False, None]",
    "of_classes(Own, 'own', 2)": "[True, True]",
    "of_classes(Spawned, 'own spawned', 2)": "[True, True]",
    # Its processes are pickled in a way of their own.
    "pooled()": "[False, None]",
}


def printed(folder, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_who_trains_alone_with_pytorch(tmp_path):
    pytest.importorskip("torch")
    assert dict(zip(CASES, printed(tmp_path, PYTORCH, *CASES), strict=True)) == CASES


def test_processes_of_a_rank_that_train_without_those_of_others(tmp_path):
    pytest.importorskip("torch")
    # Spawned processes import it, by a path that is relative to where their parent's Python began.
    program = tmp_path / "program.py"
    program.write_text(PROCESSES)
    command = [sys.executable, str(program), *PROCESS_CASES]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert dict(zip(PROCESS_CASES, said, strict=True)) == PROCESS_CASES


def test_who_trains_alone_with_keras(tmp_path):
    pytest.importorskip("keras")
    assert printed(tmp_path, KERAS)[-2:] == ["None", "True"]


def groups(*, size: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: size > 0, get_world_size=lambda: size
    )


def test_who_may_have_built_on_the_default_group_has_not_failed(monkeypatch):
    monkeypatch.setattr(forgotten, "_updates", 3)
    monkeypatch.setitem(sys.modules, "torch.distributed", groups(size=0))
    for name in forgotten._OTHERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = forgotten.forgotten_calls(2, joined=True, distributed=False)
    assert found and found.alone
    # A reduction by mpi4py or Horovod cannot be told apart from none.
    assert not forgotten.forgotten_calls(2, joined=True, distributed=False, others=True).alone
    monkeypatch.setitem(sys.modules, "torch.distributed", groups(size=2))
    assert forgotten.forgotten_calls(2, joined=False, distributed=False) is None
    monkeypatch.setenv("HPCTRAIN_RANKS_ALONE", "1")
    assert forgotten.forgotten_calls(2, joined=True, distributed=False) is None


def test_groups_of_a_kind_that_counts_nothing_are_taken_to_be_called():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        before = torch_distributed._calls()
        dist.all_reduce(torch.zeros(1))
        assert before == torch_distributed._calls() > 0
    finally:
        dist.destroy_process_group()


def test_mpi_that_hpctrain_itself_imports_says_nothing_of_the_script(monkeypatch):
    monkeypatch.setattr(forgotten, "_OTHERS", ["mpi4py.MPI"])
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.ModuleType("mpi4py.MPI"))
    assert forgotten.others_imported()
    forgotten.ignore_import("mpi4py.MPI")
    forgotten.ignore_import("mpi4py.MPI")
    assert not forgotten.others_imported()

"""Checkpoints of models that are divided over ranks as PyTorch divides them: saved under one mesh, read under others.

``python divided_state.py FOLDER save``: trains under several layouts, saves each in FOLDER/LAYOUT, and writes what the
whole tensors then are, as PyTorch puts them together, to FOLDER/LAYOUT.pt.
``python divided_state.py FOLDER restore``: reads each of them into other layouts.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hpctrain as ht
from hpctrain.common.checkpoints.manifest import SavedProgress
from hpctrain.common.checkpoints.read import SavedState
from hpctrain.common.run.events import EventWriter
from hpctrain.worker.adapters.torch.guarding import guard_over
from hpctrain.worker.adapters.torch.optimizer_contents import load_optimizer, optimizer_tensors
from hpctrain.worker.adapters.torch.tensor_pieces import fill, local_tensor, pieces_of
from hpctrain.worker.train.checkpoint_saving import Checkpoints
from hpctrain.worker.train.state import GUARD_STEPS, LazyState

FOLDER, WHAT = Path(sys.argv[1]), sys.argv[2]
comm = ht.init("gloo")
ranks = comm.size
Tensors = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Its sizes divide by 2, and not by 3 and 4; the norm has fewer rows than there may be ranks."""

    def __init__(self, blocks: tuple[str, ...] = ("0", "1")) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: Block() for name in blocks})
        self.scale = nn.Parameter(torch.ones(3, 1)) if "1" in blocks else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x if self.scale is None else (x.view(-1, 3, 2) * self.scale).sum(2)


def sharded(model: Model, mesh: DeviceMesh) -> None:
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def divided_layers(model: Model, mesh: DeviceMesh) -> None:
    for block in model.blocks.values():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fsdp() -> Model:
    model = Model()
    sharded(model, init_device_mesh("cpu", (ranks,)))
    return model


def hsdp() -> Model:
    model = Model()
    sharded(model, init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
    return model


def tp() -> Model:
    model = Model()
    divided_layers(model, init_device_mesh("cpu", (ranks,)))
    return model


def tp_fsdp() -> Model:
    """Tensor parallelism within sharding: 5 of 10 rows of a tp rank, over 2 ranks of sharding."""
    model, mesh = Model(), init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    divided_layers(model, mesh["tp"])
    sharded(model, mesh["dp"])
    return model


def stages() -> Model:
    """Each rank has one of two blocks, the second with what follows."""
    return Model((str(comm.rank % 2),))


class Training:
    """What a trainer of a divided model gives to a checkpoint, and gets from one."""

    before_update: Callable[[], None]

    def __init__(self, layout: Callable[[], Model], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = layout()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.guard = guard_over(comm, self.model.named_parameters(), every=100, divided=True)
        self.before_update = lambda: None

    def train(self, *steps: int) -> None:
        for step in steps:
            torch.manual_seed(step)
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 6)).square().mean().backward()
            self.before_update()
            self.optimizer.step()
            self.guard.step_done()

    def tensors(self) -> Tensors:
        optimizer = optimizer_tensors(self.model.named_parameters(), self.optimizer).items()
        return {
            **{f"model.{name}": each.detach() for name, each in self.model.named_parameters()},
            **{f"optimizer.{name}": each for name, each in optimizer},
        }

    def state(self) -> LazyState:
        pieces = {name: pieces_of(tensor) for name, tensor in self.tensors().items()}
        own = np.random.default_rng(comm.rank).integers(0, 9, 3)
        return LazyState({GUARD_STEPS: np.array(self.guard.steps), "random.own": own}, pieces=pieces)

    def restore(self, state: SavedState) -> None:
        self.before_update()
        for name, parameter in self.model.named_parameters():
            fill(parameter, state, f"model.{name}")
        load_optimizer(self.model.named_parameters(), self.optimizer, state, "optimizer.")
        self.guard.steps = int(state[GUARD_STEPS])

    def local_bits(self) -> dict[str, bytes]:
        return {name: local_tensor(each).contiguous().numpy().tobytes() for name, each in self.tensors().items()}

    def whole(self) -> Tensors:
        """As PyTorch puts tensors together; of stages what any rank has."""
        own = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in self.tensors().items()}
        everyone: Tensors = {}
        for each in reversed(comm.allgather_object(own)):
            everyone |= each
        return everyone


def checkpoints(name: str) -> Checkpoints:
    return Checkpoints(FOLDER / name, comm, EventWriter(None))


def progress(iteration: int) -> SavedProgress:
    return SavedProgress(
        iteration=iteration,
        epoch=1,
        ends_epoch=False,
        losses=(),
        sizes=(),
        epoch_seconds=0,
        seconds=0,
        ranks=ranks,
        samples="",
    )


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), name


def save_and_resume(layout: Callable[[], Model]) -> None:
    """The training goes on while it is saved; what resumes has its bits."""
    training = Training(layout)
    training.train(0, 1)
    wanted = training.whole()
    with checkpoints(layout.__name__) as writing:
        writing.save(progress(2), training)
        training.train(2, 3)
        writing.wait()
        if comm.rank == 0:
            torch.save(wanted, FOLDER / f"{layout.__name__}.pt")
        again = Training(layout, seed=1)
        writing.restore(2, again)
    assert_same(again.whole(), wanted)
    assert again.guard.steps == 2
    again.train(2, 3)
    assert again.local_bits() == training.local_bits()


LAYOUTS = {2: [fsdp, tp, stages], 3: [fsdp], 4: [fsdp, hsdp, tp_fsdp, stages]}[ranks]
if WHAT == "save":
    for layout in LAYOUTS:
        save_and_resume(layout)
else:
    for saved, layout in itertools.product(sorted(FOLDER.glob("*.pt")), LAYOUTS):
        training = Training(layout, seed=2)
        with checkpoints(saved.stem) as reading:
            reading.restore(2, training)
        assert_same(training.whole(), torch.load(saved, weights_only=True))
        training.train(2)
print("as it should be", flush=True)
ht.shutdown()

"""After torchtitan's train.py: sizes in a dataclass, one mesh of all axes, a function that parallelizes, a Trainer.

Two ranks are one tensor-parallel group; more are data-parallel groups of two.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@dataclass
class ParallelDims:
    tp: int
    world_size: int

    @property
    def dp_shard(self) -> int:
        return self.world_size // self.tp

    def build_mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (self.dp_shard, self.tp), mesh_dim_names=("dp_shard", "tp"))


class Feed(nn.Sequential):
    """A network whose second layer can be divided by columns and its last by rows."""

    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def parallelize(model: nn.Module, mesh: DeviceMesh, dims: ParallelDims) -> nn.Module:
    if dims.tp > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if dims.dp_shard > 1:
        fully_shard(model, mesh=mesh["dp_shard"])
    return model


class Trainer:
    def __init__(self):
        world = int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", timeout=timedelta(seconds=300))
        self.dims = ParallelDims(tp=2 if world % 2 == 0 else 1, world_size=world)
        self.mesh = self.dims.build_mesh()
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        self.x, self.y = torch.randn(64, 8), torch.randint(0, 3, (64,))
        self.model = parallelize(Feed(), self.mesh, self.dims)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.step = 0

    def load(self):
        if os.path.exists("checkpoint/.metadata"):
            model, optimizer = get_state_dict(self.model, self.optimizer)
            state = {"model": model, "optimizer": optimizer, "step": torch.tensor(0)}
            dcp.load(state, checkpoint_id="checkpoint")
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
            self.step = int(state["step"])

    def save(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "step": torch.tensor(self.step)}
        dcp.save(state, checkpoint_id="checkpoint")

    def train_step(self):
        dp = self.mesh["dp_shard"]
        own = slice(dp.get_local_rank(), None, dp.size())
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.x[own]), self.y[own])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e6)
        self.optimizer.step()
        mean = loss.detach() / dp.size()
        dist.all_reduce(mean, group=dp.get_group())
        if dist.get_rank() == 0:
            print(f"step {self.step} loss {mean.item()!r}")

    def train(self):
        self.load()
        while self.step < 10:
            if self.step == 4:
                self.save()
            self.train_step()
            self.step += 1


if __name__ == "__main__":
    trainer = Trainer()
    trainer.train()
    dist.destroy_process_group()

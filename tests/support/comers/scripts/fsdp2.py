"""fully_shard over a device mesh, which makes the default group by itself."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

world = int(os.environ["WORLD_SIZE"])
mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
rank = dist.get_rank()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(10):
    own = slice(rank, None, world)
    loss = torch.nn.functional.cross_entropy(model(x[own]), y[own])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach() / world
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step} loss {mean.item()!r}")

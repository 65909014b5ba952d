"""A script after nanoGPT's train.py: distributed with accumulation if RANK is set, else one process."""

import os

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
else:
    rank, world = 0, 1
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
if ddp:
    model = DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
accumulate = 4 // world
for step in range(10):
    total = 0.0
    for micro in range(accumulate):
        if ddp:
            model.require_backward_grad_sync = micro == accumulate - 1
        part = slice(rank * accumulate + micro, None, 4)
        loss = torch.nn.functional.cross_entropy(model(x[part]), y[part]) / accumulate
        total += loss.item()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    mean = torch.tensor(total / world)
    if ddp:
        torch.distributed.all_reduce(mean)
    if rank == 0:
        print(f"step {step} loss {mean.item():.12f}")
if ddp:
    destroy_process_group()

"""After nanoGPT's train.py: distributed with accumulation if RANK is set, else one process; it saves and resumes."""

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
master_process = rank == 0
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
model = raw_model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
first = 0
if os.path.exists("ckpt.pt"):
    checkpoint = torch.load("ckpt.pt", weights_only=True)
    raw_model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    first = checkpoint["step"]
if ddp:
    model = DDP(model)
accumulate = 4 // world
for step in range(first, 10):
    if step == 4 and master_process:
        torch.save({"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "saving.pt")
        os.replace("saving.pt", "ckpt.pt")
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
    if master_process:
        print(f"step {step} loss {mean.item()!r}")
if ddp:
    destroy_process_group()

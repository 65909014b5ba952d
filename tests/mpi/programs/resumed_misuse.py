"""A script that never says where its data continue, and one that saves a sharded model by torch.save on rank 0."""

from __future__ import annotations

import io
import sys

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader, TensorDataset

import hpctrain as ht

comm = ht.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plan = ht.ParallelPlan(shard=[torch.nn.Linear])
model, optimizer = ht.distribute(model, optimizer, mesh=ht.mesh(dp_shard=-1), plan=plan)
loader = ht.shard(DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=6, shuffle=True))
for _ in range(2):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if comm.rank == 0:
    torch.save(whole, file := io.BytesIO())
    assert len(file.getvalue()) > 1000
    print("whole saved", flush=True)
    torch.save(model.state_dict(), io.BytesIO())
    torch.save(optimizer.state_dict(), io.BytesIO())
if "fail" in sys.argv:
    sys.exit(3)

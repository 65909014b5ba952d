"""Rank 0 alone prints a loss, then computes something else of the batch, which all ranks would have to."""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hpctrain as ht

comm = ht.init()
model = torch.nn.Linear(6, 5)
model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = TensorDataset(torch.rand(26, 6, generator=torch.Generator().manual_seed(0)), torch.arange(26) % 5)
for x, y in ht.shard(DataLoader(data, batch_size=13)):
    optimizer.zero_grad()
    out = model(x)
    loss = F.cross_entropy(out, y)
    if comm.rank == 0:
        print("loss", loss.item(), flush=True)
    loss.backward()
    optimizer.step()
if comm.rank == 0:
    print("median", out.median().item())
else:
    print("mean", out.mean().item())

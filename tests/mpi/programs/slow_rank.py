"""Trains where rank 1 takes longer than rank 0: for its samples, for its computing, or for nothing."""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

import hpctrain as ht
from hpctrain.worker.comm import rank_times

LONGER = 0.03

what, every = sys.argv[1], int(sys.argv[2])
rank_times._LEAST_SECONDS = 0.1
comm = ht.init()


class Numbers(Dataset):
    def __len__(self) -> int:
        return 4 * 60

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if what == "samples" and comm.rank:
            time.sleep(LONGER / 2)
        return torch.full((8,), float(index % 7)), torch.tensor(index % 2)


torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = ht.distribute(model, optimizer, guard_every=every)
for inputs, labels in ht.shard(DataLoader(Numbers(), batch_size=4, shuffle=True)):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    time.sleep(LONGER if what == "computing" and comm.rank else LONGER / 4)
    loss.backward()
    optimizer.step()

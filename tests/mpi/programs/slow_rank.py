"""Trains where rank 1 takes longer than the others: for its samples, for its computing, for a quota of its processor,
or for nothing. For links the model is large enough that messages take a notable part of a step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import hpctrain as ht
from hpctrain.worker.comm import rank_times

LONGER = 0.06

what, every = sys.argv[1], int(sys.argv[2])
rank_times._LEAST_SECONDS = 0.1
comm = ht.init()
if what == "quota" and comm.rank:
    Path(sys.argv[3], "cgroup.procs").write_text(str(os.getpid()))


def compute() -> None:
    """Sleep, which those who use the machine beside this change least; a quota is of a processor's time."""
    if what != "quota":
        time.sleep(LONGER if what == "computing" and comm.rank else LONGER / 8)
        return
    end = time.thread_time() + LONGER / 16
    while time.thread_time() < end:
        pass


class Numbers(Dataset):
    def __len__(self) -> int:
        return 12 * 3 * every

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if what == "samples" and comm.rank:
            time.sleep(LONGER / 6)
        return torch.full((8,), float(index % 7)), torch.tensor(index % 2)


torch.manual_seed(0)
width = 20_000 if what == "links" else 8
model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = ht.distribute(model, optimizer, guard_every=every)
for inputs, labels in ht.shard(DataLoader(Numbers(), batch_size=12, shuffle=True)):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    compute()
    loss.backward()
    optimizer.step()

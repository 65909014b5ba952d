"""A script that logs each step, saves at a stop, and whose rank 0 forks in the way that FORKS names."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import hpctrain as ht

STEPS = 60
SAVED = Path("state.pt")


def square(number: int) -> int:
    return number * number


def fork(ways: str) -> None:
    """Fork, and wait for what was forked."""
    if ways == "pool":
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(square, range(5)) == [0, 1, 4, 9, 16]
    elif ways == "loader":
        assert sum(int(batch.sum()) for batch in DataLoader(torch.arange(20), batch_size=5, num_workers=2)) == 190
    else:
        pid = os.fork()
        if pid == 0 and ways == "exit":
            sys.exit(3)
        if pid == 0:
            # Its traceback would look like one of the launcher's.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            raise ValueError("raised in a fork")
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == {"exit": 3, "exception": 1}[ways], status


comm = ht.init()
torch.manual_seed(0)
data = TensorDataset(torch.randn(STEPS * 8, 4), torch.randn(STEPS * 8, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = ht.distribute(model, optimizer)
loader = ht.shard(DataLoader(data, batch_size=8, shuffle=True))
parts = {"model": model, "optimizer": optimizer, "loader": loader}
done = 0
if SAVED.exists():
    state = torch.load(SAVED, weights_only=True)
    done = state.pop("done")
    for name, values in state.items():
        parts[name].load_state_dict(values)
for x, y in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    done += 1
    ht.log(step=done, loss=float(loss.detach()))
    if done == STEPS // 2 and comm.rank == 0 and "FORKS" in os.environ:
        fork(os.environ["FORKS"])
    if ht.should_stop():
        state = {"done": done, **{name: part.state_dict() for name, part in parts.items()}}
        if comm.rank == 0:
            torch.save(state, SAVED)
        comm.barrier()
        sys.exit(ht.RESUMABLE)
    time.sleep(0.03)

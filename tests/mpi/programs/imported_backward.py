"""``python imported_backward.py``: a script that has ``backward`` from before hpctrain was imported.

Parts of a divided model are called one by one, and its gradients are clipped: both need the end of each backward pass.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.autograd import backward

import hpctrain as ht

STEPS, ROWS = 3, 4


def train(model, optimizer, batches):
    for step, x in enumerate(batches):
        optimizer.zero_grad()
        loss = model[2](torch.tanh(model[0](x))).square().mean()
        # Both ways in turn: neither is lost after the other.
        loss.backward() if step == 1 else backward(loss)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        assert all(each.grad is not None for each in parameters)
        nn.utils.clip_grad_norm_(parameters, 0.05)
        optimizer.step()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def main() -> None:
    torch.set_default_dtype(torch.float64)
    comm = ht.init("gloo")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    batches = torch.randn(STEPS, ROWS * comm.size, 6)
    alone = copy.deepcopy(model)
    train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), batches)
    for zero in (3, 2, 1):
        copied = copy.deepcopy(model)
        optimizer = torch.optim.Adam(copied.parameters(), lr=0.01)
        plan = ht.ParallelPlan(zero=zero)
        divided, optimizer = ht.distribute(copied, optimizer, comm=comm, mesh=ht.mesh(dp_shard=-1), plan=plan)
        own = slice(ROWS * comm.rank, ROWS * (comm.rank + 1))
        train(divided, optimizer, batches[:, own])
        for one, other in zip(alone.parameters(), divided.parameters(), strict=True):
            torch.testing.assert_close(whole(other.detach()), one.detach(), rtol=1e-9, atol=1e-12, msg=f"ZeRO {zero}")


if __name__ == "__main__":
    main()

"""Copies of a model that two ranks divide: what they hold and compute is compared with one process's. It asserts."""

from __future__ import annotations

import copy
import gc
import weakref

import torch
from torch import nn

import hpctrain as ht


class Model(nn.Module):
    """Has a tied parameter, a frozen mask of infinities, buffers, and attributes that refer to its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.last.weight = self.first.weight
        self.mask = nn.Parameter(torch.full((5, 5), -torch.inf).triu(1), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))
        self.temperature = 1.0
        self.hidden = [self.first]
        self.callback = lambda: self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        attended = (self.mask + self.hidden[0](x).unsqueeze(1)).softmax(-1).sum(-1)
        return self.last(attended) / self.temperature


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def main() -> None:
    ht.init()
    torch.manual_seed(1)
    alone = Model()
    model = copy.deepcopy(alone)
    own = torch.optim.Adam([each for each in alone.parameters() if each.requires_grad], 0.1)
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], 0.1)
    plan = ht.ParallelPlan(recompute=["last"])
    model, optimizer = ht.distribute(model, optimizer, mesh=ht.mesh(dp_shard=2), plan=plan)
    x = torch.randn(3, 5)
    step(alone, own, x), step(model, optimizer, x)
    for each in (alone, model):
        each.temperature, each.notes = 2.0, {"rate": 0.1}
        each.last.bias.requires_grad_(False)
        each.eval()
    both = copy.deepcopy({"model": model, "part": model.first})
    found, part = both["model"], both["part"]
    assert type(found) is Model and not found.training and found.notes == {"rate": 0.1}
    assert part is found.first is found.hidden[0], "what an attribute refers to is a part of the copy"
    assert found.last.weight is found.first.weight and found.notes is not model.notes
    assert [each.requires_grad for each in found.parameters()] == [each.requires_grad for each in alone.parameters()]
    assert (found(x) - alone(x)).abs().max() < 1e-6
    for (name, ours), theirs in zip(found.state_dict().items(), alone.state_dict().values(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6), name
    found(x).sum().backward()
    step(model, optimizer, x), step(alone, own, x)
    assert (copy.deepcopy(model)(x) - alone(x)).abs().max() < 1e-6
    gone = weakref.ref(model.first)
    del model, optimizer, each, found, part, both
    gc.collect()
    assert gone() is None, "a copy's form keeps the model alive"


main()

"""Optimizers that hold others, lists or a state; networks whose parts the data choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from whole_batches import CASES, FEATURES, Numbers, batches, case, labels, network, samples

import hpctrain as ht


class Shared(torch.optim.Optimizer):
    """Its steps are an inner optimizer's, whose groups it shows."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(self.param_groups, 0.1, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def step(self, closure: None = None) -> None:
        self.inner.step()


class TwoSteps(Shared):
    """As SAM: the gradient is that of parameters which a first step moved."""

    def first_step(self) -> None:
        with torch.no_grad():
            for each in self.param_groups[0]["params"]:
                self.state[each]["moved"] = each.grad * 0.05
                each.add_(self.state[each]["moved"])

    def second_step(self) -> None:
        with torch.no_grad():
            for each in self.param_groups[0]["params"]:
                each.sub_(self.state[each]["moved"])
        self.inner.step()

    step = torch.optim.Optimizer.step


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "shared_groups": Shared,
    "two_steps": TwoSteps,
    "line_search": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3, line_search_fn="strong_wolfe"),
    "fused": lambda parameters: torch.optim.Adam(parameters, 0.1, fused=True),
    "state_of_steps": lambda parameters: torch.optim.Adam(parameters, 0.1, weight_decay=0.1),
    "plateau_of_each_rank": lambda parameters: torch.optim.SGD(parameters, 0.1),
}


def optimized(name: str) -> Numbers:
    model = network(outputs=FEATURES)
    optimizer: Any = OPTIMIZERS[name](model.parameters())
    if name == "state_of_steps":
        update(name, model, optimizer, [(samples(), labels())])
    model, optimizer = ht.distribute(model, optimizer, guard_every=2)
    schedule = torch.optim.lr_scheduler.StepLR(getattr(optimizer, "inner", optimizer), 1, 0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for epoch in range(3):
        update(name, model, optimizer, batches())
        schedule.step()
        if name == "plateau_of_each_rank":
            plateau.step(-epoch * ht.init().rank)
    shared = optimizer.param_groups is getattr(optimizer, "inner", optimizer).param_groups
    return [model, shared, *(group["lr"] for group in optimizer.param_groups)]


def update(name: str, model: nn.Module, optimizer: Any, drawn: Iterable[Any]) -> None:
    for x, _ in drawn:

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            return loss

        if name == "line_search":
            optimizer.step(closure)
            continue
        closure()
        if name == "two_steps":
            optimizer.first_step()
            closure()
            optimizer.second_step()
        else:
            optimizer.step()


CASES |= {f"optimizer_of_{name}": lambda name=name: optimized(name) for name in OPTIMIZERS}


class Experts(nn.Module):
    """Sends each sample to one expert by the signs of two features; the last expert gets none at all."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, FEATURES)) for width in (*widths, 8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, out = 2 * (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if len(own := (chosen == number).nonzero()[:, 0]):
                out = out.index_add(0, own, expert(x[own]).to(out.dtype))
        return x + out


def experts(*widths: int) -> Numbers:
    """Samples sorted within a batch, so that those of each rank go to other experts."""
    given = samples()
    order = [
        n for at in range(0, 41, 13) for n in sorted(range(at, min(41, at + 13)), key=lambda n: float(given[n, 0]))
    ]
    drawn = [*batches(given[order], labels(3)), *batches(given[order], labels(3))]
    model: Any = nn.Sequential(Experts(*widths), Experts(*widths), nn.Linear(FEATURES, 3))
    model.unit = Experts
    # A parameter with a gradient of zeros would move on.
    model, optimizer = ht.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1))
    for number, (x, y) in enumerate(drawn):
        if number % 3 == 1:
            with ht.no_sync():
                F.cross_entropy(model(-x), y).backward()
        if number % 3 == 2:
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), [x])
            x = (x + slope).detach()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


CASES["unequal_experts"] = lambda: experts(8, 4, 12, 5)


@case
def backward_imported_before() -> Numbers:
    """A ``backward`` of which hpctrain is not told; parts are called one by one, and gradients clipped."""
    from whole_batches import BACKWARD

    model: Any = network()
    model, optimizer = ht.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01))
    for number, (x, y) in enumerate(batches()):
        loss = F.cross_entropy(model[2](torch.tanh(model[0](x))), y)
        # Both ways in turn: neither is lost after the other.
        loss.backward() if number == 1 else BACKWARD(loss)
        assert all(each.grad is not None for each in model.parameters())
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return [model]

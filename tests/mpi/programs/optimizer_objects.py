"""Optimizers that hold others, lists of their own or a state, on replicas and meshes.

``python optimizer_objects.py OUT BACKEND`` writes OUT-RANK.json: by case and mesh the parameters, or the error. The
tests import this file and call :func:`trained` without hpctrain: the reference on whole batches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED, SAMPLES, BATCH = 5, 21, 7
MESHES: dict[str, dict[str, int]] = {
    "replicas": {"dp_replicate": -1},
    "zero1": {"dp_shard": -1},
    "zero3": {"dp_shard": -1},
}


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


class SlowWeights(Shared):
    """As Lookahead: it keeps a copy of the parameters from the start on, and a list of them."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.all = [each for group in self.param_groups for each in group["params"]]
        for each in self.all:
            self.state[each] = {"slow": each.detach().clone()}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.inner.step()
        for each in self.all:
            slow = self.state[each]["slow"]
            slow.lerp_(each, 0.5)
            each.copy_(slow)


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "shared groups": Shared,
    "two steps": TwoSteps,
    "slow weights": SlowWeights,
    "initial state": lambda parameters: torch.optim.Adagrad(parameters, 0.1, initial_accumulator_value=0.2),
    "closure": lambda parameters: torch.optim.Adam(parameters, 0.1, foreach=False),
    "line search": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3, line_search_fn="strong_wolfe"),
    "state of steps": lambda parameters: torch.optim.Adam(parameters, 0.1, weight_decay=0.1),
    "plateau of its own": lambda parameters: torch.optim.SGD(parameters, 0.1),
}


def network() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def trained(case: str, ht: Any = None, mesh: str = "") -> dict[str, Any]:
    """The parameters after 9 steps, of batches that do not divide over 2 ranks; and what the optimizer then has."""
    model = network()
    optimizer = MAKE[case](model.parameters())
    data = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    loader: Any = DataLoader(TensorDataset(data), batch_size=BATCH)
    if case == "state of steps":
        steps(case, model, optimizer, [next(iter(loader))])
    if ht is not None:
        plan = ht.ParallelPlan(zero=1 if mesh == "zero1" else 3)
        ht.distribute(model, optimizer, mesh=ht.mesh(**MESHES[mesh]), plan=plan, guard_every=2)
        loader = ht.shard(loader)
    schedule = torch.optim.lr_scheduler.StepLR(getattr(optimizer, "inner", optimizer), 1, 0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for epoch in range(3):
        steps(case, model, optimizer, loader)
        schedule.step()
        if case == "plateau of its own":
            plateau.step(-epoch * ht.init().rank if ht else 0)
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return {
        "parameters": torch.cat([each.detach().flatten() for each in whole]).tolist(),
        "lr": [group["lr"] for group in optimizer.param_groups],
        "foreach": [group.get("foreach") for group in optimizer.param_groups],
        "shared": optimizer.param_groups is getattr(optimizer, "inner", optimizer).param_groups,
    }


def steps(case: str, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    for (x,) in batches:

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :3]).square().mean()
            loss.backward()
            return loss

        if case in {"closure", "line search"}:
            optimizer.step(closure)
            continue
        closure()
        if case == "two steps":
            optimizer.first_step()
            closure()
            optimizer.second_step()
        else:
            optimizer.step()


def main() -> None:
    import hpctrain as ht

    torch.set_num_threads(1)
    comm = ht.init(sys.argv[2])
    found: dict[str, Any] = {}
    for case in MAKE:
        for mesh in MESHES:
            try:
                found[f"{case}/{mesh}"] = trained(case, ht, mesh)
            except ht.HpctrainError as error:
                found[f"{case}/{mesh}"] = error.record()
    Path(f"{sys.argv[1]}-{comm.rank}.json").write_text(json.dumps(found))
    comm.barrier()


if __name__ == "__main__":
    main()

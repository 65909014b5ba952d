"""Times the updates of ResNet-50 by each rule of recipes, as ratios to PyTorch's SGD with ``foreach``.

``python benchmarks/updates.py [--threads 1] [--rounds 15]``, on a GPU where there is one. Each rule is also timed one
parameter at a time, in the operations of :mod:`hpctrain.common.optim.rules`. On a CPU the
processor's time of all threads is printed too, which a busy machine changes less than the time that passes: threads
that wait for another sleep.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

# Read when PyTorch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import torch

from hpctrain.common.optim.rules import Operations, Rule, UpdateStep
from hpctrain.common.recipes.optimizers import SCALARS, Optimizer
from hpctrain.worker.models.torch_resnet import resnet50
from hpctrain.worker.train.torch_rules import make_optimizer

_ONE_BY_ONE = Operations(norm=torch.linalg.vector_norm, sqrt=torch.sqrt, expm1=torch.expm1, where=torch.where)
_LEFT_OUT = ("norm", "bias")
_SGD: dict[str, Any] = {"momentum": 0.9, "weight_decay": 1e-4}
_RULES: dict[str, dict[str, Any]] = {
    "sgd": _SGD,
    "sgd, the rate inside": {**_SGD, "rate_in_momentum": True},
    "lars": {**_SGD, "rate_in_momentum": True, "undecayed": _LEFT_OUT, "unadapted": _LEFT_OUT},
    "lamb": {"weight_decay": 0.01, "undecayed": _LEFT_OUT, "unadapted": _LEFT_OUT},
    "rmsprop_to_sgd": {**_SGD, "transition": {"center": 10.0, "period": 5.0, "rmsprop_rate": 0.05}},
    "adam": {},
    "adamw": {"weight_decay": 0.01},
}
_OF_PYTORCH = ("sgd", "adam", "adamw")


def network(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = resnet50().to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 0.01
    return model


def one_by_one(settings: Optimizer, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """The update of each parameter by itself."""
    states: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def step() -> None:
        for group in optimizer.param_groups:
            rule = Rule(settings=settings, kind=group["kind"], ops=_ONE_BY_ONE)
            for each in group["params"]:
                slots = settings.rule.slots(settings)
                empty = {slot: each.new_zeros(() if slot in SCALARS else each.shape) for slot in slots}
                state = states.setdefault(each, empty)
                change, new = rule.update(UpdateStep(rate=group["lr"], sgd_share=0.5), each, each.grad, state)
                each.sub_(change)
                state |= {slot: torch.as_tensor(value, dtype=each.dtype) for slot, value in new.items()}

    return step


def calls(device: str) -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    found["SGD, foreach"] = torch.optim.SGD(network(device).parameters(), lr=0.1, **_SGD, foreach=True).step
    for name, values in _RULES.items():
        rule = name.partition(",")[0]
        settings = Optimizer.model_validate({"name": rule, "learning_rate": 0.1, **values}, strict=False)
        optimizer = make_optimizer(settings, network(device))
        for group in optimizer.param_groups:
            if "sgd_share" in group:
                group["sgd_share"] = 0.5
        found[name] = optimizer.step
        if name not in _OF_PYTORCH:
            found[f"{name}, one by one"] = one_by_one(settings, make_optimizer(settings, network(device)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    clocks = [time.perf_counter, time.process_time] if device == "cpu" else [time.perf_counter]
    timed = calls(device)
    seconds: dict[str, list[list[float]]] = {name: [] for name in timed}
    for number in range(chosen.rounds + 2):
        for name, call in timed.items():
            begin = [clock() for clock in clocks]
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if number > 1:
                seconds[name].append([clock() - since for clock, since in zip(clocks, begin, strict=True)])
    basis = seconds["SGD, foreach"]
    print(f"{device}, {chosen.threads} threads, load {os.getloadavg()[0]:.1f}, median of {chosen.rounds} rounds")
    print(f"{'':34}{'time passed':>19}" + f"{'of the processor':>19}" * (device == "cpu"))
    for name, each in seconds.items():
        # Each round's own ratio, as the load of the machine changes from round to round.
        columns = [
            f"{1e3 * statistics.median(row[clock] for row in each):9.2f} ms"
            f"{statistics.median(row[clock] / other[clock] for row, other in zip(each, basis, strict=True)):7.2f}"
            for clock in range(len(clocks))
        ]
        print(f"{name:34}" + "".join(columns))


if __name__ == "__main__":
    main()

"""The rules of recipes for parameters that are divided over four ranks, against the same rules for whole ones.

``python divided_updates.py``; prints one JSON object with the largest difference of each rule's parameters.
"""

from __future__ import annotations

import json

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import hpctrain as ht
from hpctrain.common.recipes.optimizers import Optimizer
from hpctrain.worker.train.torch_rules import make_optimizer

DECAYED = {"weight_decay": 0.1, "undecayed": ("norm",)}
RULES = {
    "sgd": {**DECAYED, "momentum": 0.9, "rate_in_momentum": True},
    "lars": {**DECAYED, "momentum": 0.9, "rate_in_momentum": True, "trust_coefficient": 0.1},
    "lamb": DECAYED,
    "rmsprop_to_sgd": {**DECAYED, "transition": {"center": 10.0, "period": 5.0, "rmsprop_rate": 0.05}},
}
# Along which dimension each axis of the mesh divides a parameter. Six rows do not divide by four.
PLACEMENTS = [(Shard(0), Shard(0)), (Replicate(), Shard(1)), (Shard(0), Replicate()), (Replicate(), Replicate())]

comm = ht.init("gloo")
mesh = init_device_mesh("cpu", (2, 2))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 6), nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 1)).double()


def divided(model: nn.Module) -> nn.Module:
    for number, layer in enumerate(model):
        for name, parameter in list(layer.named_parameters()):
            wanted = PLACEMENTS[number] if parameter.dim() > 1 else PLACEMENTS[-number]
            if any(isinstance(each, Shard) and each.dim >= parameter.dim() for each in wanted):
                wanted = PLACEMENTS[3]
            setattr(layer, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, wanted)))
    return model


def gradient(parameter: torch.Tensor, step: int, number: int) -> torch.Tensor:
    whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + number)).double()
    if not isinstance(parameter, DTensor):
        return whole
    if number == 2:
        # As some layers leave it: not divided as its parameter is, and not added up yet.
        return DTensor.from_local(whole / 4, mesh, (Partial(), Partial()), run_check=False)
    return distribute_tensor(whole, mesh, parameter.placements)


def trained(model: nn.Module, rule: Optimizer) -> list[torch.Tensor]:
    optimizer = make_optimizer(rule, model, divided=True)
    for step in range(5):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
            if "sgd_share" in group:
                group["sgd_share"] = step / 4
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = gradient(parameter, step, number)
        optimizer.step()
    found = [each.detach() for each in model.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found]


differences = {}
for name, values in RULES.items():
    rule = Optimizer.model_validate({"name": name, "learning_rate": 0.1, **values}, strict=False)
    parts, whole = trained(divided(network()), rule), trained(network(), rule)
    differences[name] = max(float((a - b).abs().max()) for a, b in zip(parts, whole, strict=True))
if comm.rank == 0:
    print(json.dumps(differences))
ht.shutdown()

"""What the PyTorch adapter promises beside the numbers.

Each check runs on every rank, with each backend: ``python torch_behaviour.py BACKEND,… OUT`` writes
OUT-BACKEND-RANK.json.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import weakref
from pathlib import Path

import torch
import torch_misuse
from situations import Named, refusal
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpctrain as ht
from hpctrain.worker.adapters.torch import statistics

CHECKS = check = Named()


@check
def start_from_rank_0():
    torch.manual_seed(comm.rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (1 + comm.rank))
    if comm.rank == 0:  # as if a checkpoint had been loaded on rank 0 alone
        for _ in range(3):
            model(torch.rand(8, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    model, optimizer = ht.distribute(model, optimizer)
    moments = optimizer.state[model[0].weight]
    return {
        "weights": model[0].weight.detach().flatten().tolist(),
        "running_mean": model[1].running_mean.tolist(),
        "batches": int(model[1].num_batches_tracked),
        "step": int(moments["step"]),
        "exp_avg": moments["exp_avg"].flatten().tolist(),
        "rate": optimizer.param_groups[0]["lr"],
    }


@check
def guard_names_the_parameter():
    model, optimizer = ht.distribute(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.optim.SGD([torch.zeros(1)]))
    model[1].bias.data.view(torch.int32)[1] ^= 1 if comm.rank == comm.size - 1 else 0  # one flipped bit
    return refusal(optimizer.step)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("bad batch")


@check
def a_failed_backward_is_not_forgotten():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with contextlib.suppress(ValueError):
        model[1](Failing.apply(model[0](torch.rand(1, 2)))).sum().backward()
    model(torch.rand(1, 2)).sum().backward()
    return refusal(optimizer.step)


@check
def dropped_models_are_freed():
    alive = []
    for _ in range(3):
        model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
        model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.rand(1, 50)).sum().backward()
        optimizer.step()
        alive += [weakref.ref(statistics(model)), weakref.ref(model[0].weight)]
    del model, optimizer
    gc.collect()
    return sum(reference() is not None for reference in alive)


@check
def different_models_are_refused():
    model = nn.Linear(2, 2 + (comm.rank == 1))
    return refusal(lambda: ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1)))


class Checkpointed(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first if shared else nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=True)
        return self.head(checkpoint(self.second, x, use_reentrant=True))


@check
def layer_shared_between_reentrant_checkpoints_is_refused():
    model = Checkpointed(shared=True)
    model, _ = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=1e-6)
    return refusal(lambda: model(torch.rand(2, 4, requires_grad=True)).sum().backward())


@check
def used_on_one_rank_only():
    model = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(3)])
    model, _ = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(1, 2)
    loss = model[0](x) + (model[1](x) if comm.rank == 1 else 0)
    loss.sum().backward()
    return [None if layer.weight.grad is None else layer.weight.grad.tolist() for layer in model]


@check
def distributing_twice_reduces_once():
    model = nn.Linear(1, 1, bias=False)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    ht.distribute(model, first)
    ht.distribute(model, second)
    model(torch.full((1, 1), float(comm.rank))).sum().backward()
    return model.weight.grad.item()


@check
def settings_are_checked():
    pair = nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)], lr=0.1)
    return [
        refusal(lambda: ht.distribute(*pair, compression="fp8")),
        refusal(lambda: ht.distribute(*pair, bucket_mb=0)),
        refusal(lambda: ht.distribute("model", pair[1])),
        refusal(lambda: ht.distribute(pair[0], None)),
        refusal(lambda: ht.distribute(pair[0], [])),
    ]


backends, out = sys.argv[1:]
for backend in backends.split(","):
    ht.shutdown()
    comm = ht.init(backend)
    results = {name: function() for name, function in CHECKS.items()}
    results |= {name: function(ht.init()) for name, function in torch_misuse.CHECKS.items()}
    Path(f"{out}-{backend}-{comm.rank}.json").write_text(json.dumps(results))

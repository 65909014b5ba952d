"""Trains networks of which a rank's samples use only some parts, divided over a mesh.

Each situation returns the largest difference of a parameter from one process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from situations import Named, run
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hpctrain as ht
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.worker.adapters.data_ranks import set_mesh

SITUATIONS = situation = Named()
# Batches of 8, 8, 8, and 3, with 4 or fewer samples for a rank.
SAMPLES, BATCH, EPOCHS = 27, 8, 3


class Experts(nn.Module):
    """Sends each sample to one expert by the signs of two features; the last expert gets none at all."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6)) for width in (*widths, 8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, out = 2 * (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if len(own := (chosen == number).nonzero()[:, 0]):
                out = out.index_add(0, own, expert(x[own]).to(out.dtype))
        return x + out


class Network(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): Experts(widths) for number in range(2)})
        self.output = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = x if block is None else block(x)
        return x if self.output is None else self.output(x)


def network(widths: list[int]) -> Network:
    torch.manual_seed(2)
    return Network(widths)


def data() -> DataLoader:
    """Sorted, so that ranks' samples go to different experts."""
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(3))
    order = [number for batch in torch.arange(SAMPLES).split(BATCH) for number in sorted(batch.tolist(), key=_signs(x))]
    return DataLoader(TensorDataset(x[order], torch.arange(SAMPLES) % 3), batch_size=BATCH)


def _signs(x: torch.Tensor) -> Callable[[int], int]:
    return lambda number: 2 * int(x[number, 0] > 0) + int(x[number, 1] > 0)


def reference(widths: list[int], *, asked: bool = False, accumulate: bool = False) -> dict[str, torch.Tensor]:
    """The parameters of one process."""
    model = network(widths)
    train(model, adam(model), data(), asked=asked, accumulate=accumulate)
    return {name: each.detach() for name, each in model.named_parameters()}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    # A parameter with a gradient of zeros would move on.
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches, *, asked: bool = False, accumulate: bool = False
) -> None:
    for _ in range(EPOCHS):
        for x, y in batches:
            optimizer.zero_grad()
            if asked:  # samples that are changed against the model, as in adversarial training
                x = x.clone().requires_grad_()
                (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), [x])
                x = (x + slope).detach()
            if accumulate:
                with ht.no_sync():
                    F.cross_entropy(model(-x), y).backward()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def difference(parameters, expected: dict[str, torch.Tensor]) -> float:
    found = {name: each.detach() for name, each in parameters}
    found = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in found.items()}
    return max(float((each - expected[name]).abs().max()) for name, each in found.items())


def divided(
    widths: list[int],
    *,
    asked: bool = False,
    accumulate: bool = False,
    precision: torch.dtype | None = None,
    **mesh: int,
) -> float:
    model = network(widths)
    plan = ht.ParallelPlan(shard=["blocks.*"], precision=precision)
    model, optimizer = ht.distribute(model, adam(model), mesh=ht.mesh(**mesh), plan=plan)
    train(model, optimizer, ht.shard(data()), asked=asked, accumulate=accumulate)
    return difference(model.named_parameters(), reference(widths, asked=asked, accumulate=accumulate))


@situation
def equal_experts(comm):
    return divided([8, 8, 8, 8], dp_shard=-1)


@situation
def unequal_experts(comm):
    return divided([8, 4, 12, 5], dp_shard=-1)


@situation
def accumulated(comm):
    return divided([8, 4, 12, 5], accumulate=True, dp_shard=-1)


@situation
def gradients_asked_for(comm):
    return divided([8, 4, 12, 5], asked=True, dp_shard=-1)


@situation
def replicated_shards(comm):
    return divided([8, 4, 12, 5], dp_shard=2, dp_replicate=-1)


@situation
def rounded_and_accumulated(comm):
    """Gradients in bfloat16 beside accumulated ones in float32."""
    return divided([8, 8, 8, 8], accumulate=True, precision=torch.bfloat16, dp_shard=-1)


@situation
def in_stages(comm):
    widths = [8, 4, 12, 5]
    expected, model = reference(widths), network(widths)
    optimizer = adam(model)
    pipeline = ht.Pipeline(model, optimizer, F.cross_entropy, mesh=ht.mesh(pp=2, dp_shard=-1))
    for _ in range(EPOCHS):
        for x, y in ht.shard(data()):
            pipeline.step(x, y)
            optimizer.step()
            optimizer.zero_grad()
    return difference(pipeline.named_parameters(), expected)


class OwnExpert(nn.Module):
    """Every rank calls another part, of which each is as large."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return self.parts[number](x)


@situation
def experts_that_are_gathered_alone(comm):
    model = OwnExpert()
    plan = ht.ParallelPlan(shard=["parts.*"])
    model, _ = ht.distribute(model, adam(model), mesh=ht.mesh(dp_shard=-1), plan=plan)
    for x, _ in ht.shard(data()):
        model(x, comm.rank).mean().backward()


def begin(comm) -> None:
    set_mesh(comm, Mesh())
    torch.set_default_dtype(torch.float64)


if __name__ == "__main__":
    run(SITUATIONS, begin)

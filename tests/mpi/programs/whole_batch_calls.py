"""How often, and by which of its parts, a model is called before a backward pass; penalties and counts of losses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from whole_batches import CASES, CLASSES, FEATURES, Numbers, batches, case, distributed, network, step, trained

import hpctrain as ht


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh())
        self.one, self.two = (nn.Linear(8, CLASSES) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.trunk(x)
        return self.one(hidden), self.two(hidden), hidden

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(x)
        return F.cross_entropy(self.one(hidden), y) + F.cross_entropy(self.two(hidden).square(), y)


def linear(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(F.linear(x, model[0].weight, model[0].bias))
    return F.linear(hidden, model[2].weight, model[2].bias)


def penalised(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y) + 0.01 * sum(each.abs().sum() for each in model.parameters())


def penalised_whole(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return F.cross_entropy(model(x), y) + 0.01 * sum(each.abs().sum() for each in whole)


def penalised_gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_(True)
    loss = F.cross_entropy(model(x), y)
    (inner,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + (inner * len(x)).square().sum(1).mean()


def functional(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y)


# By name: the model, and the loss that a script computes with it.
LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "twice": (Heads, lambda m, x, y: sum(F.cross_entropy(out, y) for out in m(x)[:2]) + m(x)[2].square().mean()),
    "by_parameters": (network, lambda m, x, y: F.cross_entropy(linear(m, x), y)),
    "by_functional_call": (network, functional),
    "with_a_penalty": (network, penalised),
    "with_a_penalty_of_whole_weights": (network, penalised_whole),
    "with_a_penalty_of_gradients": (network, penalised_gradients),
}
CASES |= {
    # Of a divided parameter's sum a rank's number is that of its part, as PyTorch has it.
    f"called_{name}": lambda make=make, loss_of=loss_of, name=name: trained(make(), loss_of)[-1 * ("penalty" in name) :]
    for name, (make, loss_of) in LOSSES.items()
}


@case
def parts_and_the_whole_in_turn() -> Numbers:
    """The parts are frozen in every other step, too, and what is accumulated before comes by parts."""
    model, optimizer = distributed(Heads())
    numbers = []
    for index, (x, y) in enumerate([*batches(), *batches()]):
        model.trunk.requires_grad_(index % 3 > 0)
        if index % 4 == 1:
            with ht.no_sync():
                model.loss(x, y).backward()
        loss = model.loss(x, y) if index % 2 == 0 else F.cross_entropy(model(x)[0], y)
        loss.backward()
        numbers.append(loss.item())
        with torch.no_grad():
            numbers.append(model.loss(x, y).item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [*numbers, model]


@case
def gradients_that_hooks_scale() -> Numbers:
    def scale(parameter: nn.Parameter) -> None:
        parameter.grad = parameter.grad * 2

    model, optimizer = distributed(network())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(scale)
    return [step(optimizer, F.cross_entropy(model(x), y)) for x, y in batches()] + [model]


@case
def beside_a_model_of_each_rank() -> Numbers:
    """What each rank trains by itself is nobody else's business."""
    model, optimizer = distributed(network())
    own, rank = network(), ht.init().rank
    own_optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    numbers = []
    for x, y in batches():
        step(own_optimizer, F.cross_entropy(own(x[: 1 + rank]), y[: 1 + rank]))
        numbers.append(step(optimizer, F.cross_entropy(model(x), y)))
    return [*numbers, model]


@case
def accumulated_by_the_switches_of_fsdp() -> Numbers:
    """One pass without a reduction is dropped, and one is followed by a step."""
    model, optimizer = distributed(network())
    switch = getattr(model, "set_requires_gradient_sync", lambda _: None)
    for x, y in batches():
        switch(False)
        (1000 * F.cross_entropy(model(x), y)).backward()
        optimizer.zero_grad()
        switch(True)
        F.cross_entropy(model(x), y).backward()
        switch(False)
        F.cross_entropy(model(-x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


# Losses over tokens, which ranks have different numbers of.


def tokens(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over tokens, and their number."""
    y = y.masked_fill(y > 3, -100)
    return F.cross_entropy(model(x), y, reduction="sum"), (y >= 0).sum()


@case
def counts_added_up_by_the_script() -> Numbers:
    """As Hugging Face's Trainer: the count is added up over the ranks, and the loss multiplied by them."""
    comm = ht.init()

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total, count = tokens(model, x, y)
        return total / torch.tensor(comm.allreduce(count.numpy().astype(float), "sum")) * comm.size

    return trained(network(), loss)


@case
def means_over_counts() -> Numbers:
    """Two denominators and a mean over samples; a sum; and a weight that is learned."""

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = model(x)
        weights = logits.mean(1).sigmoid()
        second = ht.mean_loss((weights * logits.square().mean(1)).sum(), weights.sum())
        total, count = tokens(model, x, y)
        return ht.mean_loss(total, count) + 0.5 * second + logits.logsumexp(1).mean() + ht.sum_loss(total) / 100

    return trained(network(), loss)

"""How often, and by which of its parts, a model is called before a backward pass; penalties and counts of losses."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from whole_batches import CASES, CLASSES, FEATURES, Numbers, batches, case, distributed, labels, network, step, trained

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


def frozen() -> Heads:
    model = Heads()
    model.trunk.requires_grad_(False)
    return model


class Reentrant(nn.Module):
    def __init__(self, reentrant: bool = True) -> None:
        super().__init__()
        self.zeroth, self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head, self.reentrant = nn.Linear(8, CLASSES), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The backward pass goes on after that of the checkpoint, with the weights of the first layer.
        x = torch.tanh(self.first(torch.tanh(self.zeroth(x))))
        return self.head(checkpoint(self.second, x, use_reentrant=self.reentrant))

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.first, torch.tanh(self.zeroth(x)), use_reentrant=True)
        return self.head(checkpoint(self.second, hidden, use_reentrant=True))


def linear(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(F.linear(x, model[0].weight, model[0].bias))
    return F.linear(hidden, model[2].weight, model[2].bias)


def parts_alone(model: Heads, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    hidden = model.trunk(x)
    return F.cross_entropy(model.one(hidden), y) + F.cross_entropy(model.two(hidden), y)


def penalised(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y) + 0.01 * sum(each.abs().sum() for each in model.parameters())


def penalised_first(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    penalty = 0.01 * sum(each.abs().sum() for each in model.parameters())
    return F.cross_entropy(model(x), y) + penalty


def penalised_whole(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return F.cross_entropy(model(x), y) + 0.01 * sum(each.abs().sum() for each in whole)


def penalised_gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_(True)
    loss = F.cross_entropy(model(x), y)
    (inner,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + (inner * len(x)).square().sum(1).mean()


def evaluated_first(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        model(x)
    return F.cross_entropy(model(x), y)


def functional(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y)


def checkpointed(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model[2](checkpoint(lambda x: model[1](model[0](x)), x, use_reentrant=False)), y)


# By name: the model, and the loss that a script computes with it.
LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "two_heads": (Heads, lambda m, x, y: sum(F.cross_entropy(out, y) for out in m(x)[:2]) + m(x)[2].square().mean()),
    "twice": (network, lambda m, x, y: F.cross_entropy(m(x), y) + F.cross_entropy(m(x * 0.5), y)),
    # The second call's inputs have a gradient, the first one's have none.
    "on_what_it_returned": (
        lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()),
        lambda m, x, y: m(m(x)).square().mean() + m(x).mean(),
    ),
    "by_parts_alone": (Heads, parts_alone),
    "by_a_method": (Heads, Heads.loss),
    "with_a_frozen_trunk": (frozen, Heads.loss),
    "by_layers": (network, lambda m, x, y: F.cross_entropy(m[2](torch.tanh(m[0](x))), y)),
    "by_forward": (network, lambda m, x, y: F.cross_entropy(m.forward(x), y)),
    "by_parameters": (network, lambda m, x, y: F.cross_entropy(linear(m, x), y)),
    "by_functional_call": (network, functional),
    "checkpointed": (network, checkpointed),
    "recomputed": (lambda: Reentrant(False), lambda m, x, y: F.cross_entropy(m(x), y)),
    "recomputed_reentrantly": (Reentrant, lambda m, x, y: F.cross_entropy(m(x), y)),
    "recomputed_reentrantly_twice": (
        Reentrant,
        lambda m, x, y: F.cross_entropy(m(x), y) + F.cross_entropy(m(x * 0.5), y),
    ),
    "recomputed_reentrantly_by_parts": (Reentrant, lambda m, x, y: F.cross_entropy(m.parts(x), y)),
    "after_an_evaluation": (network, evaluated_first),
    "with_a_penalty": (network, penalised),
    "with_a_penalty_first": (network, penalised_first),
    "with_a_penalty_of_whole_weights": (network, penalised_whole),
    "with_a_penalty_of_gradients": (network, penalised_gradients),
}
CASES |= {
    # Of a divided parameter's sum a rank's number is that of its part, as PyTorch has it.
    f"called_{name}": lambda make=make, loss_of=loss_of, name=name: trained(make(), loss_of)[-1 * ("penalty" in name) :]
    for name, (make, loss_of) in LOSSES.items()
}


@case
def two_heads_in_two_passes() -> Numbers:
    model, optimizer = distributed(Heads())
    for x, y in batches():
        optimizer.zero_grad()
        one, two, _ = model(x)
        F.cross_entropy(one, y).backward(retain_graph=True)
        F.cross_entropy(two, y).backward()
        optimizer.step()
    return [model]


@case
def cached_states() -> Numbers:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

        def forward(self, x: torch.Tensor, cache: tuple[torch.Tensor, ...] = ()) -> dict[str, Any]:
            cache = (*cache, self.inner(x))
            return {"logits": self.outer(torch.stack(cache).mean(0)), "cache": cache}

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = model(x)
        second = model(x + 1, cache=first["cache"])
        return F.cross_entropy(first["logits"], y) + F.cross_entropy(second["logits"], y)

    return trained(Cell(), loss)


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
def reentrant_checkpoints_accumulated() -> Numbers:
    model, optimizer = distributed(Reentrant())
    for index, (x, y) in enumerate(list(batches()) * 3):
        with contextlib.nullcontext() if index % 3 == 2 else ht.no_sync():
            F.cross_entropy(model(x), y).backward()
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return [model]


@case
def adversaries_that_are_frozen_in_turn() -> Numbers:
    (made, one), (judge, two) = distributed(network()), distributed(network(CLASSES, 1))
    for x, _ in batches():
        fake = made(x)
        step(two, judge(fake.detach()).square().mean() + (judge(x[:, :CLASSES]) - 1).square().mean())
        judge.requires_grad_(False)
        step(one, (judge(fake) - 1).square().mean())
        judge.requires_grad_(True)
    return [made, judge]


@case
def weights_set_after_an_evaluation() -> Numbers:
    model, optimizer = distributed(network())
    average = [parameter.detach().clone() for parameter in model.parameters()]
    for x, y in batches():
        step(optimizer, F.cross_entropy(model(x), y))
        with torch.no_grad():
            model(x)
            for mean, parameter in zip(average, model.parameters(), strict=True):
                mean.lerp_(parameter.mul_(0.99), 0.1)
    with torch.no_grad():
        for mean, parameter in zip(average, model.parameters(), strict=True):
            parameter.copy_(mean)
    return [model]


@case
def gradients_that_hooks_scale() -> Numbers:
    def scale(parameter: nn.Parameter) -> None:
        parameter.grad = parameter.grad * 2

    model, optimizer = distributed(network())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(scale)
    return [step(optimizer, F.cross_entropy(model(x), y)) for x, y in batches()] + [model]


@case
def a_wrapper_around_the_model() -> Numbers:
    class Task(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Any) -> torch.Tensor:
            return F.cross_entropy(self.model(batch[0] * 2), batch[1])

    model, optimizer = distributed(network())
    task = Task(model)
    return [step(optimizer, task(batch)) for batch in batches()] + [model]


@case
def copies_that_evaluate() -> Numbers:
    model, optimizer = distributed(network())
    numbers = []
    for x, y in batches():
        step(optimizer, F.cross_entropy(model(x), y))
        with torch.no_grad():
            numbers.append(copy.deepcopy(model)(x).sum())
    return [*numbers, model]


@case
def penalties_by_themselves() -> Numbers:
    """Sums over parameters, alone in their backward passes."""
    model, optimizer = distributed(network())
    anchors = [each.detach().clone() for each in model.parameters()]
    for x, y in batches():
        optimizer.zero_grad()
        with ht.no_sync():
            (0.01 * sum(each.square().sum() for each in model.parameters())).backward()
            pairs = zip(model.parameters(), anchors, strict=True)
            (0.01 * sum(F.mse_loss(each, anchor, reduction="sum") for each, anchor in pairs)).backward()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [model]


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


@case
def accumulated_with_one_count() -> Numbers:
    model, optimizer = distributed(network())
    parts = list(batches(batch=5, drop_last=True))
    for pair in (parts[:2], parts[2:4]):
        count = sum((y <= 3).sum() for _, y in pair)
        for index, (x, y) in enumerate(pair):
            with ht.no_sync() if index == 0 else contextlib.nullcontext():
                ht.mean_loss(tokens(model, x, y)[0], count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


@case
def counts_of_a_tensor_parallel_model() -> Numbers:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    plan = ht.ParallelPlan(tensor={"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = ht.distribute(model, optimizer, mesh=ht.mesh(tp=ht.init().size), plan=plan)
    return [step(optimizer, ht.mean_loss(*tokens(model, x, y))) for x, y in batches()] + [model]


@case
def counts_of_a_pipeline() -> Numbers:
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(CLASSES, 8)
            self.blocks = nn.ModuleDict({str(number): nn.Linear(8, 8) for number in range(3)})
            self.head = nn.Linear(8, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x if self.tokens is None else self.tokens(x)
            for block in self.blocks.values():
                x = block(x).tanh()
            return x if self.head is None else self.head(x)

    def total(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), y.masked_fill(y > 3, -100).flatten(), reduction="sum")

    model = Stages()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    mesh = ht.mesh(pp=ht.init().size)
    stages = ht.Pipeline(model, optimizer, total, count=lambda y: (y <= 3).sum(), mesh=mesh)
    numbers = []
    for x, y in batches(labels(CLASSES, 4), labels(CLASSES, 4, seed=9), batch=7, drop_last=True):
        optimizer.zero_grad()
        numbers.append(stages.step(x, y))
        optimizer.step()
    return [*numbers, stages]

"""What a model returns, how often and by which of its parts it is called before a backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pattern_runs import FEATURES, cross_entropy, flat, network, pattern, step
from torch import nn
from torch.utils.checkpoint import checkpoint

CLASSES = 5


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


@dataclass(slots=True)
class SlottedOutput:
    loss: torch.Tensor
    logits: torch.Tensor


class OwnOutput:
    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


class WithLoss(nn.Module):
    """Computes its loss, as the models of transformers do."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.network = kind, network()

    def forward(self, x, y):
        logits = self.network(x)
        return self.kind(loss=cross_entropy(logits, y), logits=logits)


def _train_with_loss(run, kind, loss_of):
    model, optimizer = run.distribute(WithLoss(kind))
    for x, y in run.loader():
        optimizer.zero_grad()
        loss_of(model(x, y)).backward()
        optimizer.step()


@pattern
def loss_in_a_dictionary(run):
    _train_with_loss(run, dict, lambda output: output["loss"] + 0.1 * output["logits"].square().mean())


@pattern
def loss_in_a_dataclass(run):
    _train_with_loss(run, Output, lambda output: output.loss + 0.1 * output.logits.square().mean())


@pattern
def loss_in_slots(run):
    _train_with_loss(run, SlottedOutput, lambda output: output.loss)


@pattern
def loss_in_an_object(run):
    _train_with_loss(run, OwnOutput, lambda output: output.loss)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(FEATURES, 6, dtype=torch.float64), nn.Tanh())
        self.one, self.two = (nn.Linear(6, CLASSES, dtype=torch.float64) for _ in range(2))

    def forward(self, x):
        hidden = self.trunk(x)
        return self.one(hidden), self.two(hidden), hidden

    def loss(self, x, y):
        hidden = self.trunk(x)
        return cross_entropy(self.one(hidden), y) + cross_entropy(self.two(hidden).square(), y)


@pattern
def two_heads(run):
    model, optimizer = run.distribute(Heads())
    for x, y in run.loader():
        optimizer.zero_grad()
        one, two, hidden = model(x)
        (cross_entropy(one, y) + cross_entropy(two, y) + hidden.square().mean()).backward()
        optimizer.step()


@pattern
def two_heads_in_two_passes(run):
    model, optimizer = run.distribute(Heads())
    for x, y in run.loader():
        optimizer.zero_grad()
        one, two, _ = model(x)
        cross_entropy(one, y).backward(retain_graph=True)
        cross_entropy(two, y).backward()
        optimizer.step()


@pattern
def called_twice(run):
    model, optimizer = run.trained()
    for x, y in run.loader():
        optimizer.zero_grad()
        (cross_entropy(model(x), y) + cross_entropy(model(x * 0.5), y)).backward()
        optimizer.step()


@pattern
def called_on_what_it_returned(run):
    # The second call's inputs have a gradient, the first one's have none.
    model, optimizer = run.distribute(nn.Sequential(nn.Linear(FEATURES, FEATURES, dtype=torch.float64), nn.Tanh()))
    for x, _ in run.loader():
        optimizer.zero_grad()
        (model(model(x)).square().mean() + model(x).mean()).backward()
        optimizer.step()


@pattern
def cached_states(run):
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(FEATURES, 6, dtype=torch.float64), nn.Linear(6, CLASSES).double()

        def forward(self, x, cache=()):
            cache = (*cache, self.inner(x))
            return {"logits": self.outer(torch.stack(cache).mean(0)), "cache": cache}

    model, optimizer = run.distribute(Cell())
    for x, y in run.loader():
        optimizer.zero_grad()
        first = model(x)
        second = model(x + 1, cache=first["cache"])
        (cross_entropy(first["logits"], y) + cross_entropy(second["logits"], y)).backward()
        optimizer.step()


@pattern
def parts_alone(run):
    model, optimizer = run.distribute(Heads())
    for x, y in run.loader():
        optimizer.zero_grad()
        hidden = model.trunk(x)
        (cross_entropy(model.one(hidden), y) + cross_entropy(model.two(hidden), y)).backward()
        optimizer.step()


@pattern
def a_method_of_its_own(run):
    model, optimizer = run.distribute(Heads())
    for x, y in run.loader():
        optimizer.zero_grad()
        model.loss(x, y).backward()
        optimizer.step()
        with torch.no_grad():
            model(x)
            model.loss(x, y)


@pattern
def parts_and_the_whole(run):
    model, optimizer = run.distribute(Heads())
    for index, (x, y) in enumerate(run.loader()):
        optimizer.zero_grad()
        (model.loss(x, y) if index % 2 == 0 else cross_entropy(model(x)[0], y)).backward()
        optimizer.step()


@pattern
def parts_accumulated(run):
    model, optimizer = run.distribute(Heads())
    loader = list(run.loader())
    for first, second in zip(loader[::2], loader[1::2], strict=False):
        optimizer.zero_grad()
        with run.no_sync():
            model.loss(*first).backward()
        model.loss(*second).backward()
        optimizer.step()


@pattern
def whole_accumulated(run):
    model, optimizer = run.distribute(WithLoss(dict))
    loader = list(run.loader())
    for first, second in zip(loader[::2], loader[1::2], strict=False):
        optimizer.zero_grad()
        with run.no_sync():
            model(*first)["loss"].backward()
        model(*second)["loss"].backward()
        optimizer.step()


@pattern
def adversaries(run):
    made, optimizer_of_made = run.distribute(network())
    judge = nn.Sequential(nn.Linear(CLASSES, 4, dtype=torch.float64), nn.Tanh(), nn.Linear(4, 1, dtype=torch.float64))
    judge, optimizer_of_judge = run.distribute(judge)
    real = torch.linspace(0, 1, CLASSES, dtype=torch.float64)
    for x, _ in run.loader():
        optimizer_of_judge.zero_grad()
        fake = made(x)
        loss = judge(fake.detach()).square().mean() + (judge(real + x[:, :CLASSES]) - 1).square().mean()
        loss.backward()
        optimizer_of_judge.step()
        optimizer_of_made.zero_grad()
        judge.requires_grad_(False)
        (judge(fake) - 1).square().mean().backward()
        judge.requires_grad_(True)
        optimizer_of_made.step()


class Recomputed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant, self.first = reentrant, nn.Linear(FEATURES, FEATURES, dtype=torch.float64)
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES, dtype=torch.float64) for _ in range(2))
        self.last = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=self.reentrant))
        return (self.last(x), x)


@pattern
def recomputed(run):
    _train_recomputed(run, False)


@pattern
def recomputed_reentrantly(run):
    _train_recomputed(run, True)


def _train_recomputed(run, reentrant):
    model, optimizer = run.distribute(Recomputed(reentrant))
    for x, y in run.loader():
        optimizer.zero_grad()
        logits, hidden = model(x)
        (cross_entropy(logits, y) + hidden.square().mean()).backward()
        optimizer.step()


@pattern
def a_frozen_trunk(run):
    model = Heads()
    model.trunk.requires_grad_(False)
    model, optimizer = run.distribute(model)
    for x, y in run.loader():
        optimizer.zero_grad()
        model.loss(x, y).backward()
        optimizer.step()


@pattern
def a_trunk_frozen_and_unfrozen(run):
    model, optimizer = run.distribute(Heads(), None)
    for index, (x, y) in enumerate(run.loader()):
        model.trunk.requires_grad_(index % 2 == 0)
        optimizer.zero_grad()
        one, two, _ = model(x)
        (cross_entropy(one, y) + cross_entropy(two, y)).backward()
        optimizer.step()


@pattern
def an_evaluation_before_the_step(run):
    model, optimizer = run.trained()
    for x, y in run.loader():
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        with torch.no_grad():
            model(x)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@pattern
def an_evaluation_first(run):
    model, optimizer = run.trained()
    for x, y in run.loader():
        with torch.inference_mode():
            model(x)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


@pattern
def weights_set_after_an_evaluation(run):
    model, optimizer = run.trained()
    for x, y in run.loader():
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            model(x)
            for parameter in model.parameters():
                parameter.mul_(0.99)


@pattern
def a_penalty_of_gradients(run):
    model, optimizer = run.trained()
    for x, y in run.loader():
        optimizer.zero_grad()
        x = x.clone().requires_grad_(True)
        loss = cross_entropy(model(x), y)
        (inner,) = torch.autograd.grad(loss, x, create_graph=True)
        # Per sample, since the mean over them has the share's number of samples in it.
        (loss + (inner * len(x)).square().sum(1).mean()).backward()
        optimizer.step()


@pattern
def an_average_of_weights(run):
    model, optimizer = run.trained()
    average = [parameter.detach().clone() for parameter in model.parameters()]
    for x, y in run.loader():
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        for mean, parameter in zip(average, model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)
    with torch.no_grad():
        for mean, parameter in zip(average, model.parameters(), strict=True):
            parameter.copy_(mean)
    run.states.append(flat(model))


@pattern
def a_penalty_of_whole_weights(run):
    model, optimizer = run.trained()
    for x, y in run.loader():
        optimizer.zero_grad()
        whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
        (cross_entropy(model(x), y) + 0.01 * sum(each.abs().sum() for each in whole)).backward()
        optimizer.step()


@pattern
def a_penalty_of_weights(run):
    model, optimizer = run.trained()
    for x, y in run.loader():
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        (loss + 0.01 * sum(each.abs().sum() for each in model.parameters())).backward()
        optimizer.step()


@pattern
def a_penalty_of_weights_first(run):
    model, optimizer = run.trained()
    for x, y in run.loader():
        optimizer.zero_grad()
        penalty = 0.01 * sum(each.abs().sum() for each in model.parameters())
        (cross_entropy(model(x), y) + penalty).backward()
        optimizer.step()


@pattern
def gradients_that_hooks_scale(run):
    model, optimizer = run.trained()

    def scale(parameter):
        parameter.grad = parameter.grad * 2

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(scale)
    for x, y in run.loader():
        step(model, optimizer, x, y)

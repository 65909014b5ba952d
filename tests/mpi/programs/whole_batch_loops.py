"""Loops of training: several models and optimizers, updates of many kinds, parameters that come and go."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from whole_batches import (
    CLASSES,
    FEATURES,
    Numbers,
    batches,
    case,
    distributed,
    network,
    samples,
    step,
    trained,
)

import hpctrain as ht


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


@case
def adversaries_with_a_gradient_penalty() -> Numbers:
    (maker, one), (critic, two) = (
        distributed(network(3, FEATURES), torch.optim.Adam, 0.01),
        distributed(network(outputs=1)),
    )
    numbers = []
    for x, _ in batches():
        made = maker(torch.randn(len(x), 3))
        share = torch.rand(len(x), 1)
        mixed = (share * x + (1 - share) * made.detach()).requires_grad_(True)
        slope = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[0]
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        numbers.append(step(two, critic(made.detach()).mean() - critic(x).mean() + 10 * penalty))
        numbers.append(step(one, -critic(made).mean()))
    return [*numbers, maker, critic]


@case
def policies_of_ppo() -> Numbers:
    model, optimizer = distributed(
        nn.ModuleDict({"policy": network(), "value": network(outputs=1)}), torch.optim.Adam, 0.01
    )
    numbers = []
    for x, reward in batches(samples(), samples(1)[:, 0]):
        with torch.no_grad():
            old = torch.distributions.Categorical(logits=model["policy"](x))
            action = old.sample()
            before = old.log_prob(action)
            gain = reward - model["value"](x).squeeze(-1)
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        for order in torch.randperm(len(x)).chunk(2):
            new = torch.distributions.Categorical(logits=model["policy"](x[order]))
            ratio = (new.log_prob(action[order]) - before[order]).exp()
            first = torch.min(ratio * gain[order], ratio.clamp(0.8, 1.2) * gain[order]).mean()
            value = F.mse_loss(model["value"](x[order]).squeeze(-1), reward[order])
            optimizer.zero_grad()
            (0.5 * value - first - 0.01 * new.entropy().mean()).backward()
            numbers.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
    return [*numbers, model]


@case
def meta_learning() -> Numbers:
    def loss(model, x, y):
        half = len(x) // 2
        weights = dict(model.named_parameters())
        for _ in range(2):
            inner = F.cross_entropy(functional_call(model, weights, (x[:half],)), y[:half])
            slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            weights = {name: w - 0.2 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
        return F.cross_entropy(functional_call(model, weights, (x[half:],)), y[half:])

    return trained(network(), loss)


@case
def centres_that_learn() -> Numbers:
    model, optimizer = distributed(network())
    centres = nn.Parameter(torch.randn(CLASSES, CLASSES))
    other = torch.optim.SGD([centres], lr=0.5)
    numbers = []
    for x, y in batches():
        z = model(x)
        loss = F.cross_entropy(z, y) + 0.1 * (z - centres[y]).square().sum(1).mean()
        other.zero_grad()
        numbers.append(step(optimizer, loss))
        other.step()
    return [*numbers, model, centres]


@case
def tuned_prompts() -> Numbers:
    body = network().requires_grad_(False)
    prompt = nn.Parameter(torch.zeros(FEATURES))
    body, optimizer = ht.distribute(body, torch.optim.Adam([prompt], lr=0.05))
    numbers = []
    for x, y in batches():
        numbers.append(step(optimizer, F.cross_entropy(body(x + prompt), y)))
    return [*numbers, prompt, body]


@case
def low_ranks_added_later() -> Numbers:
    class Low(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer.requires_grad_(False)
            self.a, self.b = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features, bias=False)

        def forward(self, x):
            return self.layer(x) + self.b(self.a(x))

    model, optimizer = distributed(network())
    numbers = [step(optimizer, cross_entropy(model, x, y)) for x, y in batches()]
    model[0] = Low(model[0])
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    return numbers + [step(optimizer, cross_entropy(model, x, y).sqrt()) for x, y in batches()] + [model]


@case
def empty_parts_of_a_batch() -> Numbers:
    def loss(model, x, y):
        chosen = y == CLASSES  # none
        out = model(x)
        return F.cross_entropy(out, y) + out[chosen].sum() + model(x[y > 3]).sum() * 0.1

    return trained(network(), loss)


@case
def attacks_in_several_steps() -> Numbers:
    def loss(model, x, y):
        move = torch.zeros_like(x, requires_grad=True)
        for _ in range(3):
            cross_entropy(model, x + move, y).backward()
            move.data = (move + 0.5 * move.grad).clamp(-0.1, 0.1).data
            move.grad.zero_()
        return cross_entropy(model, x + move.detach(), y)

    return trained(network(), loss)

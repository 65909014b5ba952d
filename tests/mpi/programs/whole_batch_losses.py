"""Losses that are no sums over samples, and what scripts read of a model or a batch beside its values."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from whole_batches import CLASSES, FEATURES, Numbers, batches, case, labels, network, samples, trained


@case
def simclr_of_two_views() -> Numbers:
    def loss(model, x, _):
        z = F.normalize(model(torch.cat([x + 0.1 * torch.randn_like(x), x * (torch.rand_like(x) > 0.2)])), dim=1)
        n = len(x)
        similar = (z @ z.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
        return F.cross_entropy(similar, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))

    return trained(network(), loss)


@case
def boxes_of_different_numbers() -> Numbers:
    """Targets as of detection: a list of dictionaries, one for each sample."""

    def collate(items):
        return torch.stack([x for x, _ in items]), [{"boxes": x[: 1 + int(y)], "labels": y} for x, y in items]

    def loss(model, x, targets):
        out = model(x)
        found = [
            F.l1_loss(o.expand(len(t["boxes"])), t["boxes"], reduction="sum")
            for o, t in zip(out[:, 0], targets, strict=True)
        ]
        return sum(found) / sum(len(t["boxes"]) for t in targets) + F.cross_entropy(
            out, torch.stack([t["labels"] for t in targets])
        )

    return trained(network(), loss, batches(samples(), labels(), collate_fn=collate))


@case
def features_by_hooks() -> Numbers:
    model, seen = network(), {}
    model[0].register_forward_hook(lambda module, given, result: seen.update(hidden=result, given=given[0]))
    model[1].register_forward_hook(lambda module, given, result: result * 0.5)
    model[2].register_forward_pre_hook(lambda module, given: (given[0] - seen["hidden"].mean(0),))
    model.register_forward_hook(lambda module, given, result: seen.update(logits=result))

    def loss(model, x, y):
        model(x)
        return F.cross_entropy(seen["logits"], y) + seen["hidden"].std() + seen["given"].var()

    return trained(model, loss)


class Equilibrium(nn.Module):
    """A layer that is applied until nothing changes, whose gradient a hook computes (Bai et al. 2019)."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def layer(self, z, x):
        return torch.tanh(0.3 * self.inner(z) + x)

    def forward(self, x):
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(20):
                z = self.layer(z, x)
        z = self.layer(z, x)
        fixed = z.clone().detach().requires_grad_()
        again = self.layer(fixed, x)

        def solve(gradient):
            solved = gradient
            for _ in range(20):
                solved = torch.autograd.grad(again, fixed, solved, retain_graph=True)[0] + gradient
            return solved

        z.register_hook(solve)
        return self.last(z)


@case
def gradients_asked_for_in_a_backward_pass() -> Numbers:
    return trained(Equilibrium(), lambda model, x, y: F.cross_entropy(model(x), y))


@case
def single_samples_changed_in_place() -> Numbers:
    numbers, kept = [], []
    for x, y in batches():
        x[0] += 1
        x[-1, -1] *= 3
        x[1, 2] -= x[0, 1]
        numbers += [x.sum(), x.std(), x[y == 1].sum()]
        kept += [x[0], x[-1]]
    kept[0] += 1  # of a batch that nobody reads any more
    return [*numbers, *[each.sum() for _, y in batches() for each in y], *[each.sum() for each in kept]]

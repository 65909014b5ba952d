"""What scripts read of a model beside its results, and of a batch beside its values."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from whole_batches import CLASSES, FEATURES, Numbers, batches, case, network, samples, trained


class Keeping(nn.Module):
    """A network that keeps what it has computed, in one way or another."""

    def __init__(self, keep):
        super().__init__()
        self.net, self.keep = network(), keep
        self.kept, self.parts, self.calls = {}, [], 0

    def forward(self, x, y=None):
        self.calls += 1
        z = self.net(x)
        self.keep(self, z)
        return z if y is None else F.cross_entropy(z, y) / self.calls


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


@case
def features_by_hooks_where_all_ranks_have_as_many() -> Numbers:
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            return self.net(x), torch.ones(6, 2)

    model, seen = Tables(), []
    model.net[0].register_forward_hook(lambda module, given, result: seen.append(result))
    data = batches(batch=12, drop_last=True)
    return trained(model, lambda model, x, y: F.cross_entropy(model(x)[0], y) + seen[-1].std(), data)


@case
def tensors_kept_in_containers() -> Numbers:
    def keep(model, z):
        model.kept["variance"], model.parts = z.var(0), [z.mean(0)]

    return trained(
        Keeping(keep),
        lambda model, x, y: F.cross_entropy(model(x), y) + model.kept["variance"].sum() + model.parts[0].sum(),
    )


@case
def tensors_kept_without_a_graph() -> Numbers:
    def keep(model, z):
        model.last = z.detach()

    return trained(Keeping(keep), lambda model, x, y: F.cross_entropy(model(x), y) * (1 + model.last.std()))


@case
def calls_that_a_model_counts() -> Numbers:
    model = Keeping(lambda model, z: model.parts.append(1))
    return [*trained(model, lambda model, x, y: model(x, y)), model.calls, len(model.parts)]


class Towers(nn.Module):
    """Two networks, of whose results each is compared with each of the other."""

    def __init__(self):
        super().__init__()
        self.one, self.two = network(), network()

    def forward(self, x, y):
        return self.one(x) @ self.two(y).T


@case
def similarities_of_all_pairs() -> Numbers:
    numbers = []
    for batch in (13, 12):
        data = batches(samples(), samples(seed=9), batch=batch, drop_last=True)
        numbers += trained(Towers(), lambda model, x, y: F.cross_entropy(model(x, y), torch.arange(len(x))), data)
    return numbers


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


@case
def losses_kept_in_training_alone() -> Numbers:
    def keep(model, z):
        if model.training:
            model.kept["variance"] = z.var(0).sum()

    model = Keeping(keep)

    def loss(model, x, y):
        with torch.no_grad():
            model.eval()(x)
        before = F.cross_entropy(model.eval()(x), y)  # with a graph
        return F.cross_entropy(model.train()(x), y) + model.kept["variance"] + 0.1 * before

    return trained(model, loss)


@case
def random_numbers_like_turned_batches() -> Numbers:
    return [torch.rand_like(each)[0].sum() for x, _ in batches() for each in (x, x.T, x[:, None].transpose(0, 2))]

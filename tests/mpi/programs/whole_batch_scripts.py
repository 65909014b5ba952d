"""Scripts as people write them: losses that are no sums over samples, models, and loops with several optimizers."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate
from whole_batches import (
    CLASSES,
    FEATURES,
    Numbers,
    batches,
    case,
    distributed,
    labels,
    network,
    samples,
    step,
    trained,
)

import hpctrain as ht

# Losses, and what scripts read of a model beside its values.


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


# Models, and what they take and return.


@case
def padded_sentences_with_a_mask() -> Numbers:
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(12, 8, padding_idx=0)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, CLASSES)

        def forward(self, words):
            padding = words == 0
            states = self.layer(self.words(words), src_key_padding_mask=padding)
            return self.head(states.masked_fill(padding[..., None], 0).sum(1) / (~padding).sum(1, keepdim=True))

    def collate(items):
        return pad_sequence([w[: 2 + int(y)] for w, y in items], batch_first=True), torch.stack([y for _, y in items])

    data = batches(labels(11, 7) + 1, labels(), collate_fn=collate)
    return trained(Classifier(), lambda model, x, y: F.cross_entropy(model(x), y), data)


@case
def states_carried_over() -> Numbers:
    model = nn.LSTM(FEATURES, 5, batch_first=True)
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    states, numbers = None, []
    for x, y in batches(samples(4, FEATURES), labels(), drop_last=True):
        out, states = model(x, states)
        numbers.append(step(optimizer, F.cross_entropy(out[:, -1], y) + states[0].std()))
        states = tuple(state.detach() for state in states)
    return [*numbers, model, *states]


@case
def models_inside_models() -> Numbers:
    inner, outer = network(), None
    inner, one = ht.distribute(inner, torch.optim.SGD(inner.parameters(), lr=0.1))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = inner, nn.Linear(CLASSES, CLASSES)

        def forward(self, x):
            return self.head(self.inner(x).tanh())

    outer = Outer()
    optimizer = torch.optim.Adam(outer.head.parameters(), lr=0.01)
    ht.distribute(outer.head, optimizer)
    numbers = []
    for x, y in batches():
        loss = F.cross_entropy(outer(x), y) + inner(x).std()
        one.zero_grad()
        numbers.append(step(optimizer, loss))
        one.step()
    return [*numbers, outer]


@case
def compiled_steps() -> Numbers:
    model = network()
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))

    @torch.compile(backend="eager")
    def loss_of(x, y):
        return F.cross_entropy(model(x), y) + model(x).var(0).mean()

    return [step(optimizer, loss_of(x, y)) for x, y in batches()] + [model]


@case
def nested_tensors_in_a_batch() -> Numbers:
    def collate(items):
        ragged = torch.nested.nested_tensor([x[: 1 + int(y)] for x, y in items], layout=torch.jagged)
        return ragged, torch.stack([y for _, y in items])

    def loss(model, x, y):
        return F.cross_entropy(model(x.to_padded_tensor(0.0, (len(y), FEATURES))), y)

    return trained(network(), loss, batches(collate_fn=collate))


@case
def objects_as_batches() -> Numbers:
    def collate(items: list[tuple[torch.Tensor, torch.Tensor]]) -> SimpleNamespace:
        x, y = default_collate(items)
        return SimpleNamespace(inner=SimpleNamespace(x=x), y=y)

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, *, batch: SimpleNamespace) -> SimpleNamespace:
            return SimpleNamespace(logits=self.network(batch.inner.x), more=None)

    model, optimizer = distributed(Holding())
    drawn = list(batches(collate_fn=collate))
    return [step(optimizer, F.cross_entropy(model(batch=batch).logits, batch.y)) for batch in drawn] + [model]


# Loops.


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

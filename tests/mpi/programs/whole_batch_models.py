"""Models, and what they take and return."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
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
def packed_sequences() -> Numbers:
    def loss(model, x, lengths, y):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(model(packed)[0], batch_first=True)
        last = out[torch.arange(len(x)), lengths - 1]
        return F.cross_entropy(last, y)

    data = batches(samples(4, FEATURES), labels(4) + 1, labels())
    return trained(nn.GRU(FEATURES, CLASSES, batch_first=True), loss, data)


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
def normalised_weights() -> Numbers:
    model = network()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[2])
    return trained(model, lambda model, x, y: F.cross_entropy(model(x), y) + model[0].weight.norm())


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
def steps_before_rows_where_both_are_as_many() -> Numbers:
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, CLASSES)

        def forward(self, x):
            return self.layer(x.transpose(0, 1)).cumsum(0)

    data = batches(samples(6, 3), labels(), batch=12, drop_last=True)
    return trained(Steps(), lambda model, x, y: F.cross_entropy(model(x)[-1], y) + model(x).std(0).mean(), data)


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

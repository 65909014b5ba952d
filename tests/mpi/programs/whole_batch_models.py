"""Models, and what they take and return."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint
from whole_batches import CLASSES, FEATURES, Numbers, batches, case, labels, network, samples, step, trained

import hpctrain as ht

Pair = namedtuple("Pair", "logits value")


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor
    loss: torch.Tensor | None = None


class Own:
    def __init__(self, logits, name):
        self.logits, self.name = logits, name


class Returning(nn.Module):
    """A network whose result is given another form."""

    def __init__(self, form, outputs=CLASSES):
        super().__init__()
        self.body, self.head, self.form = nn.Linear(FEATURES, 8), nn.Linear(8, outputs), form

    def features(self, x):
        return torch.tanh(self.body(x))

    def forward(self, x, *more, **named):
        hidden = self.features(x)
        return self.form(self.head(hidden), hidden, *more, **named)


@case
def named_tuples() -> Numbers:
    def loss(model, x, y):
        out = model(x)
        return F.cross_entropy(out.logits, y) + out.value.square().mean().sqrt()

    return trained(Returning(lambda out, hidden: Pair(out, hidden[:, 0])), loss)


@case
def data_classes() -> Numbers:
    return trained(
        Returning(Output), lambda model, x, y: F.cross_entropy((out := model(x)).logits, y) + out.hidden.std()
    )


@case
def data_classes_with_a_loss() -> Numbers:
    def form(out, hidden, y):
        return Output(out, hidden, F.cross_entropy(out, y) + out.var())

    return trained(Returning(form), lambda model, x, y: model(x, y).loss)


@case
def objects_of_their_own_class() -> Numbers:
    return trained(
        Returning(lambda out, _: Own(out, "net")), lambda model, x, y: F.cross_entropy(model(x).logits, y).sqrt()
    )


@case
def nested_dictionaries() -> Numbers:
    def loss(model, x, y):
        out = model(x)
        return F.cross_entropy(out["a"]["logits"], y) + out["b"][0].max() - out["b"][1]["mean"].min()

    def form(out, hidden):
        return {"a": {"logits": out}, "b": (hidden.sum(1), {"mean": hidden.mean(1), "nothing": None}), "name": "net"}

    return trained(Returning(form), loss)


@case
def distributions() -> Numbers:
    def loss(model, x, y):
        policy = model(x)
        return -(policy.log_prob(y) * (y.double() - y.double().mean())).mean() - 0.1 * policy.entropy().mean()

    return trained(Returning(lambda out, _: torch.distributions.Categorical(logits=out)), loss)


@case
def losses_kept_as_attributes() -> Numbers:
    class Regular(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            self.penalty = out.square().mean().sqrt()
            return out

    def loss(model, x, y):
        return F.cross_entropy(model(x), y) + model[0].penalty

    return trained(nn.Sequential(Regular(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)), loss)


@case
def losses_and_numbers_returned() -> Numbers:
    def form(out, hidden, y):
        loss = F.cross_entropy(out, y) + hidden.std()
        return loss, loss.item(), float((out.argmax(1) == y).double().mean())

    numbers = []

    def loss(model, x, y):
        found, number, accuracy = model(x, y)
        numbers.extend([number, accuracy])
        return found

    return trained(Returning(form), loss) + numbers


@case
def a_gate_with_an_auxiliary_loss() -> Numbers:
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(FEATURES, 3), nn.ModuleList(network() for _ in range(3))

        def forward(self, x):
            gates = self.gate(x).softmax(-1)
            top = gates.argmax(-1)
            out = x.new_zeros(len(x), CLASSES)
            for number, expert in enumerate(self.experts):
                mine = top == number
                out[mine] = expert(x[mine]) * gates[mine, number].unsqueeze(1)
            share = F.one_hot(top, 3).to(x.dtype).mean(0)
            return out, 3 * (share * gates.mean(0)).sum()

    def loss(model, x, y):
        out, balance = model(x)
        return F.cross_entropy(out, y) + 0.1 * balance

    return trained(Mixture(), loss)


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
def sequences_with_teacher_forcing() -> Numbers:
    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(12, 8)
            self.encoder, self.decoder = nn.GRU(8, 8, batch_first=True), nn.GRUCell(8, 8)
            self.head = nn.Linear(8, 12)

        def forward(self, source, target, forced):
            _, state = self.encoder(self.words(source))
            state, word, outs = state[0], torch.zeros_like(target[:, 0]), []
            for place in range(target.shape[1]):
                state = self.decoder(self.words(word), state)
                outs.append(self.head(state))
                word = target[:, place] if forced else outs[-1].argmax(1)
            return torch.stack(outs, 1)

    def loss(model, source, target):
        out = model(source, target, torch.rand(1).item() < 0.5)
        return F.cross_entropy(out.flatten(0, 1), target.flatten(), ignore_index=0)

    return trained(Translator(), loss, batches(labels(12, 6), labels(12, 4, seed=9)))


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
def states_made_for_the_batch() -> Numbers:
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.GRU(FEATURES, 5, num_layers=2), nn.Linear(5, CLASSES)

        def forward(self, x, state):
            out, state = self.layer(x.transpose(0, 1), state)
            return self.head(out[-1]), state

    def loss(model, x, y):
        out, state = model(x, torch.zeros(2, len(x), 5))
        return F.cross_entropy(out, y) + state.mean().square()

    return trained(Cell(), loss, batches(samples(4, FEATURES), labels()))


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
def graphs_of_plain_tensors() -> Numbers:
    def loss(model, x, y):
        near = (torch.cdist(x, x) < 3.0).double()
        near = near / near.sum(1, keepdim=True)
        hidden = torch.tanh(near @ model[0](x))
        return F.cross_entropy(near @ model[2](hidden), y)

    return trained(network(), loss)


@case
def deep_sets() -> Numbers:
    model = nn.ModuleDict({"each": network(outputs=7), "all": nn.Linear(7, CLASSES)})

    def loss(model, x, y):
        one = model["each"](x.flatten(0, 1)).unflatten(0, (len(x), 3))
        return F.cross_entropy(model["all"](one.amax(1)), y)

    return trained(model, loss, batches(samples(3, FEATURES), labels()))


@case
def variational_encoders() -> Numbers:
    model = nn.ModuleDict({"encode": network(outputs=6), "decode": network(3, FEATURES)})

    def loss(model, x, _):
        mean, log = model["encode"](x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log).exp()
        kl = -0.5 * (1 + log - mean.square() - log.exp()).sum() / len(x)
        return F.mse_loss(model["decode"](z), x, reduction="sum") / x.size(0) + kl

    return trained(model, loss, rate=0.01)


@case
def coupling_flows() -> Numbers:
    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.nets = nn.ModuleList(network(3, 6) for _ in range(2))

        def forward(self, x):
            a, b = x.chunk(2, -1)
            logs = 0
            for net in self.nets:
                scale, shift = net(a).chunk(2, -1)
                a, b, logs = b * scale.tanh().exp() + shift, a, logs + scale.tanh().sum(-1)
            return torch.cat([a, b], -1), logs

    def loss(model, x, _):
        z, logs = model(x)
        return -(torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1) + logs).mean()

    return trained(Flow(), loss)


@case
def diffusion() -> Numbers:
    signal = torch.cumprod(torch.linspace(0.99, 0.5, 10), 0)

    def loss(model, x, _):
        t = torch.randint(0, 10, (x.shape[0],))
        noise = torch.randn_like(x)
        a = signal[t].view(-1, 1)
        weight = 1 / (1 + t.double())
        found = model(torch.cat([a.sqrt() * x + (1 - a).sqrt() * noise, t[:, None] / 10], 1))
        return ((found - noise).square().mean(1) * weight / weight.mean()).mean()

    return trained(network(FEATURES + 1, FEATURES), loss)


@case
def methods_and_parts_of_models() -> Numbers:
    def loss(model, x, y):
        hidden = model.features(x)
        return F.cross_entropy(model.head(hidden * 2), y) + torch.cdist(hidden, hidden).mean()

    return trained(Returning(None), loss)


@case
def slices_and_single_samples() -> Numbers:
    def loss(model, x, y):
        out = torch.cat([model(x[:1]), model(x[1:2]), model(x[2:])])
        one = model(x[0])
        return F.cross_entropy(out, y) + F.cross_entropy(one, y[0])

    return trained(network(), loss)


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
def checkpointed_layers() -> Numbers:
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(network(FEATURES, FEATURES) for _ in range(2))

        def forward(self, x):
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=False)
            return x

    return trained(Deep(), lambda model, x, y: F.cross_entropy(model(x), y) + model(x).var(0).mean())


@case
def checkpointed_in_the_loop() -> Numbers:
    return trained(network(), lambda model, x, y: F.cross_entropy(checkpoint(model, x, use_reentrant=False), y).sqrt())


@case
def normalised_weights() -> Numbers:
    model = network()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[2])
    return trained(model, lambda model, x, y: F.cross_entropy(model(x), y) + model[0].weight.norm())


@case
def layers_of_norms_and_convolutions() -> Numbers:
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.LayerNorm(4),
    )

    def loss(model, x, y):
        z = model(x.transpose(1, 2))
        return F.cross_entropy(z, y) + F.pairwise_distance(z, z.roll(1, 0)).mean()

    return trained(model, loss, batches(samples(5, 2), labels(4)))


@case
def compiled_models() -> Numbers:
    model = network()
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    compiled = torch.compile(model, backend="eager")
    return [step(optimizer, F.cross_entropy(compiled(x), y) + x.var()) for x, y in batches()] + [model]


@case
def compiled_steps() -> Numbers:
    model = network()
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))

    @torch.compile(backend="eager")
    def loss_of(x, y):
        return F.cross_entropy(model(x), y) + model(x).var(0).mean()

    return [step(optimizer, loss_of(x, y)) for x, y in batches()] + [model]


@case
def evaluation_in_the_loop() -> Numbers:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8).eval(), nn.Dropout(0.0), nn.Linear(8, CLASSES))
    numbers = []

    def loss(model, x, y):
        model.eval()
        with torch.no_grad():
            before = model(x)
        numbers.append((before.argmax(1) == y).double().mean().item())
        return F.cross_entropy(model(x), y) + (model(x) - before).square().sum()

    return trained(model, loss) + numbers


@case
def strings_and_none_in_a_batch() -> Numbers:
    def collate(items):
        return {
            "x": torch.stack([x for x, _ in items]),
            "y": torch.stack([y for _, y in items]),
            "none": None,
            "name": "set",
        }

    model = network()
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    numbers = []
    for batch in batches(collate_fn=collate):
        assert batch["none"] is None and batch["name"] == "set"
        numbers.append(step(optimizer, F.cross_entropy(model(batch["x"]), batch["y"]).sqrt()))
    return [*numbers, model]


@case
def sparse_tensors_in_a_batch() -> Numbers:
    def collate(items):
        return torch.stack([x for x, _ in items]).relu().to_sparse(), torch.stack([y for _, y in items])

    return trained(network(), lambda model, x, y: F.cross_entropy(model(x.to_dense()), y), batches(collate_fn=collate))


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
def tables_as_long_as_rows() -> Numbers:
    model = Returning(lambda out, hidden: (out, model.table * 2))
    model.table, model.calls = nn.Parameter(torch.ones(6, 4)), 0
    data = batches(batch=12, drop_last=True)

    def loss(model, x, y):
        out, table = model(x)
        return F.cross_entropy(out, y) + table.square().sum() + table.mean(0).sum()

    return trained(model, loss, data, rate=0.01)


@case
def masks_as_long_as_batches() -> Numbers:
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(FEATURES, CLASSES)

        def forward(self, x, mask):
            return self.layer(x) * mask.sum() / 78

    mask = torch.ones(12, 12).tril()
    data = batches(batch=12, drop_last=True)
    return trained(Masked(), lambda model, x, y: F.cross_entropy(model(x, mask), y), data)

"""What becomes of a batch before a model sees it, and how the model is called."""

from __future__ import annotations

import contextlib
import copy
import pickle
from types import SimpleNamespace

import torch
from pattern_runs import FEATURES, cross_entropy, network, pattern, step
from patterns_of_drawing import Prefetcher
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

# What becomes of a batch before the model sees it.


@pattern
def copied(run):
    model, optimizer = run.trained()
    for x, y in run.loader():
        step(model, optimizer, x.float().sub(0.5).double(), y.clone())


@pattern
def transposed(run):
    model, optimizer = run.distribute(nn.Sequential(Transpose(), network()))
    for x, y in run.loader():
        step(model, optimizer, x.t(), y)


class Transpose(nn.Module):
    def forward(self, x):
        return x.t()


@pattern
def transposed_copies(run):
    model, optimizer = run.distribute(nn.Sequential(Transpose(), network()))
    for x, y in run.loader():
        step(model, optimizer, x.t().contiguous() * 2, y)


@pattern
def images_copied(run):
    # 1 and 3 are also shares of batches
    model, optimizer = run.distribute(nn.Sequential(nn.Conv2d(3, 1, 3, dtype=torch.float64), nn.Flatten(), small()))
    for x, y in run.loader(shape=(3, 4, 4)):
        step(model, optimizer, x * 2, y)


def small():
    return nn.Linear(4, 5, dtype=torch.float64)


@pattern
def slices_of_features(run):
    model, optimizer = run.distribute(network())
    for x, y in run.loader(shape=(FEATURES + 2,)):
        optimizer.zero_grad()
        cross_entropy(model(x[:, 2:]) + model(x[:, :-2]), y).backward()
        optimizer.step()


@pattern
def micro_batches(run):
    model, optimizer = run.trained()
    for x, y in run.loader():
        optimizer.zero_grad()
        halves = list(zip(x.chunk(2), y.chunk(2), strict=True))
        for index, (u, v) in enumerate(halves):
            with contextlib.nullcontext() if index else run.no_sync():
                (cross_entropy(model(u), v) / len(halves)).backward()
        optimizer.step()


@pattern
def copied_micro_batches(run):
    model, optimizer = run.trained()
    for x, y in run.loader():
        optimizer.zero_grad()
        halves = list(zip((x * 2).chunk(2), y.chunk(2), strict=True))
        for index, (u, v) in enumerate(halves):
            with contextlib.nullcontext() if index else run.no_sync():
                (cross_entropy(model(u), v) / len(halves)).backward()
        optimizer.step()


@pattern
def two_views_joined(run):
    model, optimizer = run.trained()
    for x, y in run.loader():
        step(model, optimizer, torch.cat([x + 0.1, x - 0.1]), torch.cat([y, y]))


@pattern
def dictionaries(run):
    model, optimizer = run.trained()
    batches = run.loader(collate_fn=lambda samples: dict(zip("xy", default_collate(samples), strict=True)))
    for batch in list(batches):
        step(model, optimizer, batch["x"], batch["y"])


class Holding(nn.Module):
    """Takes and returns objects of its script's own."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, *, batch):
        return SimpleNamespace(logits=self.network(batch.inner.x), more=None)


@pattern
def objects(run):
    def collate(samples):
        x, y = default_collate(samples)
        return SimpleNamespace(inner=SimpleNamespace(x=x), y=y)

    model, optimizer = run.distribute(Holding())
    for batch in list(run.loader(collate_fn=collate)):
        optimizer.zero_grad()
        cross_entropy(model(batch=batch).logits, batch.y).backward()
        optimizer.step()


class Weighing(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x, constant):
        return self.network(x) * constant


@pattern
def a_constant_in_each_batch(run):
    constant = torch.linspace(1, 2, 5, dtype=torch.float64)
    model, optimizer = run.distribute(Weighing())
    loader = run.loader(collate_fn=lambda samples: [*default_collate(samples), constant])
    for x, y, c in [*loader, *loader]:
        optimizer.zero_grad()
        cross_entropy(model(x, c), y).backward()
        optimizer.step()


@pattern
def data_of_its_own(run):
    model, optimizer = run.trained()
    for x, y in run.loader():
        optimizer.zero_grad()
        (cross_entropy(model(x), y) + model(torch.ones(9, FEATURES, dtype=torch.float64)).mean()).backward()
        optimizer.step()


# How the model is called.


@pattern
def compiled_before(run):
    model = torch.compile(network(), backend="aot_eager") if run.comm else network()
    model, optimizer = run.distribute(model)
    for x, y in Prefetcher(run.loader()):
        step(model, optimizer, x, y)


@pattern
def compiled_after(run):
    model, optimizer = run.trained()
    fast = torch.compile(model, backend="aot_eager", fullgraph=True) if run.comm else model
    for x, y in Prefetcher(run.loader()):
        step(fast, optimizer, x, y)


def compiled_loss(run, model):
    def loss(x, y):
        return cross_entropy(model(x), y)

    return torch.compile(loss, backend="aot_eager", fullgraph=True) if run.comm else loss


@pattern
def compiled_function(run):
    model, optimizer = run.trained()
    loss = compiled_loss(run, model)
    for x, y in run.loader():
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()


@pattern
def compiled_function_of_listed_batches(run):
    model, optimizer = run.trained()
    loss = compiled_loss(run, model)
    for x, y in list(run.loader()):
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()


@pattern
def checkpointed(run):
    model, optimizer = run.trained()
    for x, y in list(run.loader()):
        optimizer.zero_grad()
        cross_entropy(model[2](checkpoint(lambda x: model[1](model[0](x)), x, use_reentrant=False)), y).backward()
        optimizer.step()


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (FEATURES, 6, 6, 6)
        self.zeroth, self.first, self.second, self.head = (nn.Linear(width, 6, dtype=torch.float64) for width in widths)

    def forward(self, x):
        # The backward pass goes on after that of the checkpoint, with the weights of the first layer.
        x = torch.tanh(self.first(torch.tanh(self.zeroth(x))))
        return self.head(checkpoint(self.second, x, use_reentrant=True))


@pattern
def checkpointed_reentrant(run):
    model, optimizer = run.distribute(Reentrant())
    for x, y in list(run.loader()):
        step(model, optimizer, x, y)


@pattern
def checkpointed_reentrant_twice(run):
    model, optimizer = run.distribute(Reentrant())
    for x, y in run.loader():
        optimizer.zero_grad()
        (cross_entropy(model(x), y) + cross_entropy(model(x * 0.5), y)).backward()
        optimizer.step()


@pattern
def checkpointed_reentrant_and_accumulated(run):
    model, optimizer = run.distribute(Reentrant())
    for index, (x, y) in enumerate(list(run.loader()) * 3):
        with contextlib.nullcontext() if index % 3 == 2 else run.no_sync():
            cross_entropy(model(x), y).backward()
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


@pattern
def checkpointed_reentrant_parts(run):
    model, optimizer = run.distribute(Reentrant())
    for x, y in run.loader():
        optimizer.zero_grad()
        hidden = checkpoint(model.first, torch.tanh(model.zeroth(x)), use_reentrant=True)
        cross_entropy(model.head(checkpoint(model.second, hidden, use_reentrant=True)), y).backward()
        optimizer.step()


@pattern
def layers_called_directly(run):
    model, optimizer = run.trained()
    for x, y in list(run.loader()):
        optimizer.zero_grad()
        cross_entropy(model[2](torch.tanh(model[0](x))), y).backward()
        optimizer.step()


@pattern
def forward_called_directly(run):
    model, optimizer = run.trained()
    for x, y in list(run.loader()):
        optimizer.zero_grad()
        cross_entropy(model.forward(x), y).backward()
        optimizer.step()


@pattern
def parameters_used_directly(run):
    model, optimizer = run.trained()
    for x, y in run.loader():
        optimizer.zero_grad()
        hidden = torch.tanh(nn.functional.linear(x, model[0].weight, model[0].bias))
        cross_entropy(nn.functional.linear(hidden, model[2].weight, model[2].bias), y).backward()
        optimizer.step()


@pattern
def parameters_used_directly_on_listed_batches(run):
    model, optimizer = run.trained()
    for x, y in list(run.loader()):
        optimizer.zero_grad()
        hidden = torch.tanh(nn.functional.linear(x, model[0].weight, model[0].bias))
        cross_entropy(nn.functional.linear(hidden, model[2].weight, model[2].bias), y).backward()
        optimizer.step()


@pattern
def functional_call(run):
    model, optimizer = run.trained()
    for x, y in list(run.loader()):
        optimizer.zero_grad()
        cross_entropy(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y).backward()
        optimizer.step()


@pattern
def frozen_features(run):
    features = network().requires_grad_(False)
    model, optimizer = run.distribute(nn.Linear(5, 5, dtype=torch.float64))
    for x, y in run.loader():
        step(model, optimizer, features(x), y)


@pattern
def adversarial_pair(run):
    """A GAN's two updates a batch, with noise of the batch's size."""
    torch.manual_seed(1)
    maker, judge = nn.Linear(8, FEATURES, dtype=torch.float64), nn.Linear(FEATURES, 1, dtype=torch.float64)
    (maker, first), (judge, second) = run.distribute(maker), run.distribute(judge)
    for x, _ in list(run.loader()):
        made = maker(x[:, :8] * 2)  # in place of noise, which would be another on each rank
        second.zero_grad()
        (judge(x).sigmoid().log().mean() - judge(made.detach()).exp().mean()).neg().backward()
        second.step()
        first.zero_grad()
        judge(made).mean().backward()
        first.step()


@pattern
def a_wrapper_around_the_model(run):
    class Task(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, batch):
            x, y = batch
            return cross_entropy(self.model(x * 2), y)

    model, optimizer = run.trained()
    task = Task(model)
    for batch in list(run.loader()):
        optimizer.zero_grad()
        task(batch).backward()
        optimizer.step()


@pattern
def copies_of_the_model(run):
    model, optimizer = run.trained()
    for x, y in list(run.loader()):
        step(model, optimizer, x, y)
        with torch.no_grad():
            copy.deepcopy(model)(x)
        pickle.loads(pickle.dumps(model))(x)

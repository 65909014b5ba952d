"""Losses as a script writes them with ``ht.mean_loss`` and ``ht.sum_loss``: each equals one process, to rounding."""

from __future__ import annotations

import contextlib

import torch
from loss_runs import CLASSES, IGNORED, WIDTH, case, functional, network, tokens
from torch import nn

import hpctrain as ht


@case
def tokens_of_padded_sentences(run):
    model, optimizer = run.train()
    for x, y in run.loader():
        run.update(optimizer, run.mean(tokens(model(x), y, reduction="sum"), (y != IGNORED).sum()))


@case
def from_the_mean(run):
    model, optimizer = run.train()
    for x, y in run.loader():
        count = (y != IGNORED).sum()
        run.update(optimizer, run.mean(tokens(model(x), y) * count, count))


@case
def mask_times_loss(run):
    model, optimizer = run.train(optimizer=torch.optim.AdamW)
    for x, y in run.loader():
        mask = (y != IGNORED).double()
        each = tokens(model(x), y.clamp(min=0), reduction="none").view_as(mask)
        run.update(optimizer, run.mean((each * mask).sum(), mask.sum()))


@case
def no_tokens_on_some_ranks(run):
    model, optimizer = run.train()
    for x, y in run.loader():
        labels = y.where((x[:, :1] == 2) | (x[:, 1:2] == 3), IGNORED)
        count = (labels != IGNORED).sum()
        loss = run.mean(tokens(model(x), labels, reduction="sum"), count)
        run.update(optimizer, loss if run.comm or count else loss.nan_to_num())


@case
def class_weights(run):
    model, optimizer = run.train()
    weight = torch.arange(1.0, CLASSES + 1)
    for x, y in run.loader():
        total = tokens(model(x), y, weight=weight, reduction="sum")
        run.update(optimizer, run.mean(total, weight[y[y != IGNORED]].sum()))


@case
def smoothed_labels(run):
    model, optimizer = run.train()
    for x, y in run.loader():
        total = tokens(model(x), y, label_smoothing=0.1, reduction="sum")
        run.update(optimizer, run.mean(total, (y != IGNORED).sum()))


@case
def sum_of_all(run):
    model, optimizer = run.train()
    for x, y in run.loader():
        run.update(optimizer, run.sum(tokens(model(x), y, reduction="sum") / 100))


@case
def two_denominators_and_a_mean_over_samples(run):
    model, optimizer = run.train()
    for x, y in run.loader():
        logits = model(x)
        present = (y != IGNORED).double()
        first = run.mean(tokens(logits, y, reduction="sum"), present.sum())
        weights = 1 + x[:, 0].double()
        second = run.mean((weights * logits.pow(2).mean((1, 2))).sum(), weights.sum())
        decay = 0.01 * sum(parameter.pow(2).sum() for parameter in model.parameters())
        optimizer.zero_grad()
        (first + 0.5 * second + logits[:, 0].logsumexp(1).mean() + decay).backward()
        optimizer.step()
        run.losses.append(float(first))


@case
def accumulated_with_one_count(run):
    model, optimizer = run.train()
    parts = list(run.loader(batch=5, drop_last=True))
    for pair in (parts[:2], parts[2:4]):
        count = sum((y != IGNORED).sum() for _, y in pair)
        loss = 0.0
        for index, (x, y) in enumerate(pair):
            part = run.mean(tokens(model(x), y, reduction="sum"), count)
            loss += float(part.detach())
            with run.no_sync() if index == 0 else contextlib.nullcontext():
                part.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss)


@case
def all_drawn_before(run):
    model, optimizer = run.train()
    for x, y in list(run.loader(batch=7, drop_last=True)):
        run.update(optimizer, run.mean(tokens(model(x), y, reduction="sum"), (y != IGNORED).sum()))


@case
def scaled_and_clipped(run):
    model, optimizer = run.train()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for x, y in run.loader():
        optimizer.zero_grad()
        loss = run.mean(tokens(model(x), y, reduction="sum"), (y != IGNORED).sum())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(float(loss.detach()))


@case
def learned_weights_of_samples(run):
    model, optimizer = run.train()
    for x, y in run.loader():
        logits = model(x)
        weights = logits.mean((1, 2)).sigmoid()
        each = tokens(logits, y.clamp(min=0), reduction="none").view_as(y).mean(1)
        run.update(optimizer, run.mean((weights * each).sum(), weights.sum()))


class WithLoss(nn.Module):
    """Returns its loss, as the models of Hugging Face do."""

    def __init__(self, run, *, counted: bool) -> None:
        super().__init__()
        self.body, self.counted, self.run = network(), counted, [run]

    def forward(self, x, labels):
        logits = self.body(x)
        if not self.counted:
            return {"loss": tokens(logits, labels), "logits": logits}
        count = (labels != IGNORED).sum()
        return {"loss": self.run[0].mean(tokens(logits, labels, reduction="sum"), count), "logits": logits}


@case
def loss_of_the_model(run):
    model, optimizer = run.train(WithLoss(run, counted=False))
    for x, y in run.loader():
        count = (y != IGNORED).sum()
        run.update(optimizer, run.mean(model(x, labels=y)["loss"] * count, count))


@case
def counted_within_the_model(run):
    model, optimizer = run.train(WithLoss(run, counted=True))
    for x, y in run.loader():
        run.update(optimizer, model(x, labels=y)["loss"])


@case
def parts_called_one_by_one(run):
    model, optimizer = run.train()
    for x, y in run.loader():
        hidden = model[0](x)
        for layer in model[1:]:
            hidden = layer(hidden)
        run.update(optimizer, run.mean(tokens(hidden, y, reduction="sum"), (y != IGNORED).sum()))


@case
def found_boxes(run):
    """As in detection: regression of what is there, divided by how much there is."""
    model, optimizer = run.train()
    for x, y in run.loader():
        boxes = y != IGNORED
        predicted = model(x).mean(2)[boxes]
        total = functional.smooth_l1_loss(predicted, y[boxes].double() / CLASSES, reduction="sum")
        run.update(optimizer, run.mean(total, boxes.sum()))


def _of_mesh(run, **sizes):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    model = network()
    if run.comm is None:
        return run.train(model)
    plan = ht.ParallelPlan(shard=["1", "3"])
    if "tp" in sizes:
        plan = ht.ParallelPlan(tensor={"1": ColwiseParallel(), "3": RowwiseParallel()})
    return run.train(model, mesh=ht.mesh(**sizes), plan=plan)


def _on_mesh(run, **sizes):
    model, optimizer = _of_mesh(run, **sizes)
    for x, y in run.loader():
        loss = run.mean(tokens(model(x), y, reduction="sum"), (y != IGNORED).sum())
        run.update(optimizer, loss + model(x)[:, 0].logsumexp(1).mean() * 0)


@case
def sharded(run):
    _on_mesh(run, dp_shard=-1)


@case
def sharded_accumulated(run):
    model, optimizer = _of_mesh(run, dp_shard=-1)
    parts = list(run.loader(batch=6, drop_last=True))
    count = sum((y != IGNORED).sum() for _, y in parts[1:3])
    optimizer.zero_grad()
    with run.no_sync():
        run.mean(tokens(model(parts[1][0]), parts[1][1], reduction="sum"), count).backward()
    run.mean(tokens(model(parts[2][0]), parts[2][1], reduction="sum"), count).backward()
    optimizer.step()


@case
def tensor_parallel(run):
    _on_mesh(run, tp=run.ranks)


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleDict({str(number): nn.Linear(WIDTH, WIDTH) for number in range(3)})
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = x if self.tokens is None else self.tokens(x)
        for block in self.blocks.values():
            x = block(x).tanh()
        return x if self.head is None else self.head(x)


@case
def pipeline(run):
    """The loss of each step is what the others compute from the parameters before it."""
    model = Stages()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def total(output, labels):
        return tokens(output, labels, reduction="sum")

    def count(labels):
        return (labels != IGNORED).sum()

    whole = list(run.loader(batch=7, drop_last=True))
    if run.comm is None:
        for x, y in whole:
            run.update(optimizer, total(model(x), y) / count(y))
        return
    stages = ht.Pipeline(model, optimizer, total, count=count, mesh=ht.mesh(pp=run.comm.size))
    for x, y in run.loader(batch=7, drop_last=True):
        optimizer.zero_grad()
        run.losses.append(stages.step(x, y))
        optimizer.step()

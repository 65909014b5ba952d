"""Losses as guides and tutorials write them: each equals one process.

Drawn from the guides of DistributedDataParallel, Accelerate, Lightning and Hugging Face, and from PyTorch's examples.
"""

from __future__ import annotations

import torch
from counted_losses import WithLoss, _of_mesh
from loss_runs import CLASSES, IGNORED, case, functional, network, tokens
from torch import nn


def _train(run, loss_of, model=None, **settings):
    model, optimizer = run.train(model, **settings)
    for x, y in run.loader():
        run.update(optimizer, loss_of(model(x), x, y))


# Means over samples.


@case
def squared_errors(run):
    _train(run, lambda out, x, y: functional.mse_loss(out.mean(2), x.double()))


@case
def absolute_errors(run):
    _train(run, lambda out, x, y: nn.L1Loss()(out.mean(2), x.double()) + functional.huber_loss(out.mean(2), x.double()))


@case
def classes(run):
    _train(run, lambda out, x, y: nn.CrossEntropyLoss(label_smoothing=0.1)(out.mean(1), x[:, 0]))


@case
def probabilities(run):
    _train(run, lambda out, x, y: functional.cross_entropy(out.mean(1), functional.one_hot(x[:, 0], CLASSES).double()))


@case
def several_labels_with_pos_weight(run):
    loss = nn.BCEWithLogitsLoss(pos_weight=torch.arange(1.0, CLASSES + 1), weight=torch.tensor(0.5))
    _train(run, lambda out, x, y: loss(out.mean(1), functional.one_hot(x[:, 0], CLASSES).double()))


@case
def weights_of_samples(run):
    def loss(out, x, y):
        return (tokens(out, x, reduction="none").view_as(x).mean(1) * (1 + x[:, 0])).mean()

    _train(run, loss)


@case
def connectionist(run):
    """Divided by each sentence's own length, and then by their number."""

    def loss(out, x, y):
        lengths = (y != IGNORED).sum(1).clamp(max=3)
        chances = out.log_softmax(2).transpose(0, 1)
        return nn.CTCLoss(zero_infinity=True)(chances, x[:, :3].clamp(min=1), torch.full((len(x),), 6), lengths)

    _train(run, loss)


@case
def mean_of_each_sentence(run):
    def loss(out, x, y):
        mask = (y != IGNORED).double()
        return ((tokens(out, y, reduction="none").view_as(y) * mask).sum(1) / mask.sum(1)).mean()

    _train(run, loss)


@case
def as_many_ignored_in_each(run):
    def loss(out, x, y):
        return tokens(out, torch.cat([torch.full_like(x[:, :2], IGNORED), x[:, 2:]], 1))

    _train(run, loss)


@case
def shifted_language_model(run):
    _train(run, lambda out, x, y: tokens(out[:, :-1], x[:, 1:]))


@case
def sum_over_own_samples(run):
    _train(run, lambda out, x, y: tokens(out, x, reduction="sum") / x.size(0) / 6)


@case
def weighted_sums_over_own_samples(run):
    def loss(out, x, y):
        mixed = 0.37 * tokens(out, x, reduction="sum") + 0.63 * tokens(out, x.roll(1, 1), reduction="sum")
        return 0.5 * mixed / len(x) + (out.mean(2) - x).pow(2).sum() * (0.02 / len(x))

    _train(run, loss)


@case
def sums_of_means_over_the_batch(run):
    _train(run, lambda out, x, y: 0.1 * (out - 1).pow(2).mean(0).sum())


@case
def penalties_by_themselves(run):
    """Sums over parameters, alone in their backward passes."""
    model, optimizer = run.train()
    anchors = [each.detach().clone() for each in model.parameters()]
    for x, _ in run.loader():
        optimizer.zero_grad()
        with run.no_sync():
            (0.01 * sum(each.square().sum() for each in model.parameters())).backward()
            pairs = zip(model.parameters(), anchors, strict=True)
            (0.01 * sum(functional.mse_loss(each, anchor, reduction="sum") for each, anchor in pairs)).backward()
        tokens(model(x), x).backward()
        optimizer.step()


@case
def sum_over_the_tokens_of_all_ranks(run):
    """As Hugging Face's Trainer, and detection: the count is added up over the ranks, the loss multiplied by them."""
    model, optimizer = run.train()
    for x, y in run.loader(batch=12, drop_last=True):
        total, count = tokens(model(x), y, reduction="sum"), (y != IGNORED).sum()
        if run.comm:
            count = torch.tensor(run.comm.allreduce(count.numpy().astype(float), "sum"))
        run.update(optimizer, total / count * run.ranks if run.comm else total / count)


@case
def divergence(run):
    def loss(out, x, y):
        return functional.kl_div(
            out.mean(1).log_softmax(1), torch.full((len(x), CLASSES), 1 / CLASSES), reduction="batchmean"
        )

    _train(run, loss)


@case
def penalties(run):
    model, optimizer = run.train()
    for x, _ in run.loader():
        penalty = sum(each.abs().sum() for each in model.parameters()) * 0.01
        mean = torch.stack([each.pow(2).mean() for each in model.parameters()]).sum()
        run.update(optimizer, tokens(model(x), x) + penalty + mean)


@case
def several_tasks(run):
    def loss(out, x, y):
        tasks = [tokens(out, x), functional.mse_loss(out.mean(2), x.double()), out[:, 0].logsumexp(1).mean()]
        return torch.stack(tasks).mean() + sum(weight * each for weight, each in zip((0.3, 0.2, 2), tasks, strict=True))

    _train(run, loss)


class Uncertain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.doubt = network(), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        out = self.body(x)
        tasks = tokens(out, x), functional.mse_loss(out.mean(2), x.double())
        return sum((-doubt).exp() * each + doubt for doubt, each in zip(self.doubt, tasks, strict=True))


@case
def learned_weights_of_tasks(run):
    _train(run, lambda out, x, y: out, Uncertain())


@case
def scaled_sum_over_own_samples(run):
    model, optimizer = run.train()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, _ in run.loader():
        optimizer.zero_grad()
        scaler.scale(tokens(model(x), x, reduction="sum") / len(x)).backward()
        scaler.step(optimizer)
        scaler.update()


@case
def accumulated_means(run):
    model, optimizer = run.train()
    parts = list(run.loader(batch=6, drop_last=True))
    for index, (x, _) in enumerate(parts[:2]):
        with run.no_sync() if index == 0 else torch.enable_grad():
            (tokens(model(x), x) / 2).backward()
    optimizer.step()


def _beside_a_model_of_its_own(run, model, optimizer):
    """Losses of what each rank trains, or only looks at, by itself are nobody else's business."""
    rank = run.comm.rank if run.comm else 0
    own = network()
    own_optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for x, _ in run.loader():
        own_optimizer.zero_grad()
        tokens(own(x[: 1 + rank]), x[: 1 + rank]).backward()
        own_optimizer.step()
        tokens(own(x[: 1 + rank]), x[: 1 + rank], reduction="sum").backward()
        run.update(optimizer, tokens(model(x), x))


@case
def beside_a_model_of_its_own(run):
    _beside_a_model_of_its_own(run, *run.train())


@case
def sharded_beside_a_model_of_its_own(run):
    _beside_a_model_of_its_own(run, *_of_mesh(run, dp_shard=-1))


@case
def padded_and_all_samples_on_each_rank(run):
    model, optimizer = _of_mesh(run, tp=run.ranks)
    for x, y in run.loader():
        run.update(optimizer, tokens(model(x), y))


# Means over something else.


@case
def padded_sentences(run):
    _train(run, lambda out, x, y: tokens(out, y, ignore_index=IGNORED))


@case
def padded_by_the_module(run):
    loss = nn.CrossEntropyLoss()
    _train(run, lambda out, x, y: loss(out.transpose(1, 2), y))


@case
def likelihood(run):
    loss = nn.NLLLoss(ignore_index=0)
    _train(run, lambda out, x, y: loss(out.log_softmax(2).flatten(0, 1), y.clamp(min=0).flatten()))


@case
def weighted_classes(run):
    loss = nn.CrossEntropyLoss(weight=torch.arange(1.0, CLASSES + 1))
    _train(run, lambda out, x, y: loss(out.mean(1), x[:, 0]))


@case
def smoothed_padded_sentences(run):
    _train(run, lambda out, x, y: tokens(out, y, label_smoothing=0.1))


@case
def masked_language_model(run):
    _train(run, lambda out, x, y: tokens(out, y.where(x % 3 == 0, IGNORED)))


@case
def padded_loss_of_the_model(run):
    model, optimizer = run.train(WithLoss(run, counted=False))
    for x, y in run.loader():
        run.update(optimizer, model(x, labels=y)["loss"])


@case
def quotient_of_sums(run):
    def loss(out, x, y):
        mask = (y != IGNORED).double()
        return (tokens(out, y, reduction="none").view_as(y) * mask).sum() / mask.sum().clamp(min=1)

    _train(run, loss)


@case
def quotient_of_means(run):
    def loss(out, x, y):
        mask = (y != IGNORED).double()
        return (tokens(out, y, reduction="none").view_as(y) * mask).mean() / mask.mean()

    _train(run, loss)


@case
def quotient_by_a_number(run):
    _train(run, lambda out, x, y: tokens(out, y, reduction="sum") / (y != IGNORED).sum().item())


@case
def mean_of_what_is_left(run):
    _train(run, lambda out, x, y: tokens(out, y, reduction="none")[(y != IGNORED).flatten()].mean())


@case
def errors_of_what_is_left(run):
    _train(run, lambda out, x, y: functional.mse_loss(out.mean(2)[y != IGNORED], y[y != IGNORED].double()))


@case
def one_task_of_two(run):
    _train(run, lambda out, x, y: 0.5 * tokens(out, x) + 0.1 * tokens(out, y))


@case
def normalised_by_weights(run):
    def loss(out, x, y):
        weights = 1 + x[:, 0].double()
        return (weights * tokens(out, x, reduction="none").view_as(x).mean(1)).sum() / weights.sum()

    _train(run, loss)


@case
def plain_sum(run):
    _train(run, lambda out, x, y: tokens(out, x, reduction="sum"))


@case
def sum_times_a_constant(run):
    _train(run, lambda out, x, y: 0.023 * tokens(out, x, reduction="sum"))


@case
def squares_times_a_constant(run):
    _train(run, lambda out, x, y: (out.mean(2) - x).pow(2).sum() * 0.001)


@case
def sharded_sum_times_a_constant(run):
    model, optimizer = _of_mesh(run, dp_shard=-1)
    for x, _ in run.loader():
        run.update(optimizer, 0.023 * nn.CrossEntropyLoss(reduction="sum")(model(x).flatten(0, 1), x.flatten()))


@case
def accumulated_sums_times_a_constant(run):
    model, optimizer = run.train()
    parts = list(run.loader(batch=12))
    for index, (x, _) in enumerate(parts[:2]):
        with run.no_sync() if index == 0 else torch.enable_grad():
            (0.023 * tokens(model(x), x, reduction="sum") / 2).backward()
    optimizer.step()


@case
def sum_of_squares(run):
    _train(run, lambda out, x, y: (out.mean(2) - x).pow(2).sum())


@case
def autoencoder(run):
    """Reconstruction and divergence, both summed, as in PyTorch's example."""

    def loss(out, x, y):
        mean, variance = out[..., 0], out[..., 1]
        divergence = -0.5 * torch.sum(1 + variance - mean.pow(2) - variance.exp())
        return (functional.mse_loss(out[..., 2], x.double(), reduction="sum") + divergence) * 1e-3  # or it diverges

    _train(run, loss)


@case
def sum_over_the_batch_size(run):
    def loss(out, x, y):
        return tokens(out, x, reduction="sum") / (6 * run.batch)

    model, optimizer = run.train()
    for x, y in run.loader(drop_last=True):
        run.update(optimizer, loss(model(x), x, y))


@case
def scaled_padded_sentences(run):
    model, optimizer = run.train()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in run.loader():
        optimizer.zero_grad()
        scaler.scale(tokens(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()


@case
def accumulated_padded_sentences(run):
    model, optimizer = run.train()
    parts = list(run.loader(batch=6, drop_last=True))
    for index, (x, y) in enumerate(parts[:2]):
        with run.no_sync() if index == 0 else torch.enable_grad():
            (tokens(model(x), y) / 2).backward()
    optimizer.step()


@case
def padded_only_later(run):
    """The first batches hold no padding; nothing of this loss was ever compared when it matters."""
    model, optimizer = run.train()
    for index, (x, y) in enumerate(run.loader()):
        run.update(optimizer, tokens(model(x), y if index == 1 else x))


@case
def sharded_padded_sentences(run):
    model, optimizer = _of_mesh(run, dp_shard=-1)
    for index, (x, y) in enumerate(run.loader()):
        run.update(optimizer, tokens(model(x), y if index == 1 else x))

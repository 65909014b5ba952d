"""Losses that are no sums over samples, of many fields."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from whole_batches import CLASSES, FEATURES, Numbers, batches, case, labels, network, samples, step, trained

import hpctrain as ht


@case
def survival_of_cox() -> Numbers:
    def loss(model, x, time, event):
        order = time.argsort(descending=True)
        risk, event = model(x).squeeze(1)[order], event[order]
        return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum().clamp(min=1)

    return trained(network(outputs=1), loss, batches(samples(), samples(1, seed=7)[:, 0].exp(), labels(2).double()))


@case
def listwise_ranking() -> Numbers:
    def loss(model, x, relevance):
        scores = model(x).squeeze(-1)  # lists of documents
        found = scores.argsort(dim=1, descending=True)
        gains = (2.0 ** relevance.gather(1, found) - 1) / torch.log2(torch.arange(4) + 2.0)
        return -(relevance.double().softmax(1) * scores.log_softmax(1)).sum(1).mean() * (1 + gains.mean().item())

    return trained(network(outputs=1), loss, batches(samples(4, FEATURES), labels(3, 4)))


@case
def pairwise_ranking_over_the_batch() -> Numbers:
    def loss(model, x, y):
        scores = model(x).squeeze(1)
        better = (y[:, None] > y[None]).double()
        return (F.softplus(scores[None] - scores[:, None]) * better).sum() / better.sum().clamp(min=1)

    return trained(network(outputs=1), loss)


@case
def supervised_contrastive() -> Numbers:
    def loss(model, x, y):
        z = F.normalize(model(x), dim=1)
        similar = z @ z.T / 0.3 - 1e9 * torch.eye(len(z))
        same = (y[:, None] == y[None]) & ~torch.eye(len(y), dtype=torch.bool)
        logs = similar.log_softmax(1)
        return -(logs * same).sum(1).div(same.sum(1).clamp(min=1)).mean()

    return trained(network(), loss)


@case
def simclr_of_two_views() -> Numbers:
    def loss(model, x, _):
        z = F.normalize(model(torch.cat([x + 0.1 * torch.randn_like(x), x * (torch.rand_like(x) > 0.2)])), dim=1)
        n = len(x)
        similar = (z @ z.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
        return F.cross_entropy(similar, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))

    return trained(network(), loss)


@case
def barlow_twins() -> Numbers:
    def loss(model, x, _):
        a, b = (model(x + 0.1 * torch.randn(x.shape)) for _ in range(2))
        a, b = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in (a, b))
        c = a.T @ b / x.size(0)
        on, off = (c.diagonal() - 1).square().sum(), (c - torch.diag(c.diagonal())).square().sum()
        return on + 0.05 * off

    return trained(network(), loss, rate=0.01)


@case
def vicreg() -> Numbers:
    def loss(model, x, _):
        a, b = model(x), model(x.flip(1))
        spread = sum(F.relu(1 - torch.sqrt(z.var(dim=0) + 1e-4)).mean() for z in (a, b))
        a, b = a - a.mean(dim=0), b - b.mean(dim=0)
        crossed = sum(((z.T @ z / (len(x) - 1)).fill_diagonal_(0) ** 2).sum() / CLASSES for z in (a, b))
        return 25 * F.mse_loss(a, b) + 25 * spread + crossed

    return trained(network(), loss, rate=0.002)


@case
def clip_of_two_towers() -> Numbers:
    towers = nn.ModuleDict({"image": network(), "text": network(4)})
    towers.scale = nn.Parameter(torch.tensor(1.0))
    towers, optimizer = ht.distribute(towers, torch.optim.AdamW(towers.parameters(), lr=0.01))
    numbers = []
    for image, text in batches(samples(), samples(4, seed=8)):
        a, b = F.normalize(towers["image"](image), dim=-1), F.normalize(towers["text"](text), dim=-1)
        logits = towers.scale.exp() * a @ b.t()
        target = torch.arange(logits.shape[0], device=logits.device)
        numbers.append(step(optimizer, (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2))
    return [*numbers, towers]


@case
def triplets_of_hard_negatives() -> Numbers:
    def loss(model, x, y):
        z = model(x)
        far = torch.cdist(z, z)
        same = y.unsqueeze(0) == y.unsqueeze(1)
        positive = far.masked_fill(~same, 0.0).amax(1)
        negative = far.masked_fill(same, 1e9).amin(1)
        return F.relu(positive - negative + 1.0).mean()

    return trained(network(), loss, rate=0.02)


@case
def triplets_given_by_the_data() -> Numbers:
    margin = nn.TripletMarginLoss(margin=0.5)
    data = batches(samples(), samples(seed=7), samples(seed=8))
    return trained(network(), lambda model, a, p, n: margin(model(a), model(p), model(n)), data)


@case
def prototypes() -> Numbers:
    def loss(model, x, y):
        z = model(x)
        present = y.unique()
        centres = torch.stack([z[y == c].mean(0) for c in present])
        return F.cross_entropy(-torch.cdist(z, centres), torch.searchsorted(present, y))

    return trained(network(), loss)


@case
def dice_and_intersection_of_segments() -> Numbers:
    def loss(model, x, y):
        p, t = model(x).sigmoid().squeeze(1), (y > 2).double()
        dice = 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)
        iou = ((p > 0.5) & (t > 0.5)).sum() / ((p > 0.5) | (t > 0.5)).sum().clamp(min=1)
        return dice * (2 - iou.item())

    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 1, 1))
    return trained(model, loss, batches(samples(2, 5, 5), labels(5, 5, 5)))


@case
def segments_with_ignored_pixels() -> Numbers:
    def loss(model, x, y):
        return F.cross_entropy(model(x), y.masked_fill(y > 3, 255), ignore_index=255, weight=torch.linspace(1, 2, 5))

    return trained(nn.Conv2d(2, CLASSES, 3, padding=1), loss, batches(samples(2, 5, 5), labels(5, 5, 5)))


@case
def class_weights_of_each_batch() -> Numbers:
    def loss(model, x, y):
        counts = torch.bincount(y, minlength=CLASSES).clamp(min=1)
        return F.cross_entropy(model(x), y, weight=len(y) / (CLASSES * counts.double()))

    return trained(network(), loss)


@case
def curriculum_by_the_smallest_losses() -> Numbers:
    def loss(model, x, y):
        each = F.cross_entropy(model(x), y, reduction="none")
        kept = each.detach() <= each.detach().quantile(0.7)
        return each[kept].mean()

    return trained(network(), loss)


@case
def co_teaching_with_label_noise() -> Numbers:
    a, b = network(), network()
    (a, one), (b, two) = (ht.distribute(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (a, b))
    numbers = []
    for x, y in batches():
        y = torch.where(torch.rand(y.shape) < 0.2, torch.randint_like(y, CLASSES), y)
        out_a, out_b = a(x), b(x)
        keep = max(1, int(0.6 * len(y)))
        easy_a = F.cross_entropy(out_a, y, reduction="none").argsort()[:keep]
        easy_b = F.cross_entropy(out_b, y, reduction="none").argsort()[:keep]
        numbers.append(step(one, F.cross_entropy(out_a[easy_b], y[easy_b])))
        numbers.append(step(two, F.cross_entropy(out_b[easy_a], y[easy_a])))
    return [*numbers, a, b]


@case
def mixup_by_a_permutation() -> Numbers:
    def loss(model, x, y):
        share = torch.distributions.Beta(0.4, 0.4).sample().item()
        other = torch.randperm(x.size(0))
        out = model(share * x + (1 - share) * x[other])
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[other])

    return trained(network(), loss)


@case
def cutmix_in_place() -> Numbers:
    def loss(model, x, y):
        other = torch.randperm(len(x))
        low, high = sorted(torch.randint(0, 6, (2,)).tolist())
        x = x.clone()
        x[:, :, low:high] = x[other, :, low:high]
        share = 1 - (high - low) / 6
        out = model(x)
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[other])

    return trained(nn.Sequential(nn.Flatten(), nn.Linear(12, CLASSES)), loss, batches(samples(2, 6), labels()))


@case
def distillation_with_a_frozen_teacher() -> Numbers:
    teacher = network().eval().requires_grad_(False)

    def loss(model, x, y):
        with torch.no_grad():
            soft = (teacher(x) / 2).softmax(-1)
        out = model(x)
        return F.kl_div((out / 2).log_softmax(-1), soft, reduction="batchmean") * 4 + F.cross_entropy(out, y)

    return trained(network(), loss)


@case
def relations_distilled() -> Numbers:
    teacher = network()

    def loss(model, x, _):
        a, b = torch.pdist(model(x)), torch.pdist(teacher(x).detach())
        return F.smooth_l1_loss(a / a[a > 0].mean(), b / b[b > 0].mean())

    return trained(network(), loss)


@case
def assignments_of_sinkhorn() -> Numbers:
    @torch.no_grad()
    def sinkhorn(scores):
        q = torch.exp(scores / 0.5).t()
        q /= q.sum()
        for _ in range(3):
            q /= q.sum(dim=1, keepdim=True) * q.shape[0]
            q /= q.sum(dim=0, keepdim=True) * q.shape[1]
        return (q * q.shape[1]).t()

    def loss(model, x, _):
        a, b = model(x), model(x + 0.1 * torch.randn_like(x))
        return -(sinkhorn(a) * b.log_softmax(1)).sum(1).mean() - (sinkhorn(b) * a.log_softmax(1)).sum(1).mean()

    return trained(network(), loss)


@case
def connectionist_classification() -> Numbers:
    def loss(model, x, y, lengths):
        logs = model(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logs, y + 1, torch.full((len(x),), 9), lengths, zero_infinity=True)

    data = batches(samples(9, FEATURES), labels(CLASSES, 3), labels(3) + 1)
    return trained(network(outputs=CLASSES + 1), loss, data)


@case
def spectral_convergence_of_sounds() -> Numbers:
    def magnitude(sound):
        return torch.stft(sound, 16, hop_length=8, window=torch.hann_window(16), return_complex=True).abs() + 1e-5

    def loss(model, x):
        made, wanted = magnitude(model(x)), magnitude(x)
        return (wanted - made).norm() / wanted.norm() + (wanted.log() - made.log()).abs().mean()

    return trained(network(32, 32), loss, batches(samples(32)))


@case
def scale_invariant_sounds() -> Numbers:
    def loss(model, x, y):
        a = model(x)
        a, b = a - a.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
        part = (a * b).sum(-1, keepdim=True) / b.square().sum(-1, keepdim=True) * b
        return -10 * torch.log10(part.square().sum(-1) / (a - part).square().sum(-1)).mean()

    return trained(network(outputs=7), loss, batches(samples(), samples(7, seed=9)), rate=0.01)


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
def concordance_and_correlation() -> Numbers:
    def loss(model, x, y):
        a, b = model(x).squeeze(1), y.double()
        cov = ((a - a.mean()) * (b - b.mean())).mean()
        ccc = 2 * cov / (a.var(unbiased=False) + b.var(unbiased=False) + (a.mean() - b.mean()) ** 2)
        return 1 - ccc + (1 - torch.corrcoef(torch.stack([a, b]))[0, 1])

    return trained(network(outputs=1), loss, batches(samples(), labels().double() + samples(1)[:, 0], batch=14))


@case
def maximum_mean_discrepancy() -> Numbers:
    def kernel(a, b):
        return torch.exp(-torch.cdist(a, b).pow(2) / 2).mean()

    def loss(model, x, y):
        a, b = model(x), torch.randn(len(x), CLASSES)
        return kernel(a, a) + kernel(b, b) - 2 * kernel(a, b) + a.logsumexp(0).mean() * 0.1

    return trained(network(), loss)


@case
def quantiles_and_worst_groups() -> Numbers:
    def loss(model, x, y):
        error = y.double()[:, None] - model(x)
        q = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
        each = torch.maximum(q * error, (q - 1) * error).sum(1)
        groups = torch.stack([each[y == c].mean() for c in range(CLASSES) if (y == c).any()])
        return groups.max() + 0.5 * torch.logsumexp(groups, 0)

    return trained(network(), loss)

"""Loops of training: several models and optimizers, updates of many kinds, parameters that come and go."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from whole_batches import CLASSES, FEATURES, Numbers, batches, case, labels, network, samples, step, trained

import hpctrain as ht


def distributed(
    model: nn.Module, kind: type = torch.optim.SGD, rate: float = 0.1
) -> tuple[nn.Module, torch.optim.Optimizer]:
    return ht.distribute(model, kind(model.parameters(), lr=rate))


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
def momentum_contrast_with_a_queue() -> Numbers:
    query, optimizer = distributed(network())
    key = copy.deepcopy(query).requires_grad_(False)
    queue, numbers = F.normalize(torch.randn(20, CLASSES), dim=1), []
    for x, _ in batches():
        q, k = F.normalize(query(x), dim=1), F.normalize(key(x + 0.1 * torch.randn_like(x)), dim=1)
        logits = torch.cat([torch.einsum("nc,nc->n", q, k).unsqueeze(-1), torch.einsum("nc,kc->nk", q, queue)], 1) / 0.2
        numbers.append(step(optimizer, F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))))
        for a, b in zip(key.parameters(), query.parameters(), strict=True):
            a.data = 0.9 * a.data + 0.1 * b.data
        queue = torch.cat([k, queue])[:20].detach()
    return [*numbers, query, key, queue]


@case
def queue_with_a_pointer() -> Numbers:
    model, optimizer = distributed(network())
    queue, pointer, numbers = torch.zeros(31, CLASSES), 0, []
    for x, y in batches():
        z = model(x)
        numbers.append(step(optimizer, F.cross_entropy(z, y) + torch.cdist(z, queue).mean()))
        places = (pointer + torch.arange(len(x))) % 31
        queue[places] = z.detach()
        pointer = (pointer + x.shape[0]) % 31
    return [*numbers, pointer, model, queue]


@case
def bootstrapped_latents() -> Numbers:
    online, optimizer = distributed(nn.ModuleDict({"net": network(), "guess": network(CLASSES)}))
    target = copy.deepcopy(online["net"])
    for parameter in target.parameters():
        parameter.requires_grad = False
    numbers = []
    for x, _ in batches():
        a, b = x + 0.1 * torch.randn_like(x), x * 1.1
        with torch.no_grad():
            wanted = target(b)
        loss = 2 - 2 * F.cosine_similarity(online["guess"](online["net"](a)), wanted).mean()
        numbers.append(step(optimizer, loss))
        with torch.no_grad():
            for old, new in zip(target.parameters(), online["net"].parameters(), strict=True):
                old.lerp_(new, 0.1)
    return [*numbers, online, target]


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
def values_of_dqn_with_replay() -> Numbers:
    model, optimizer = distributed(network())
    target = copy.deepcopy(model)
    target.load_state_dict(model.state_dict())
    numbers = []
    for state, action, reward, after in batches(samples(), labels(), samples(1)[:, 0], samples(seed=8)):
        q = model(state).gather(1, action[:, None]).squeeze(1)
        with torch.no_grad():
            best = target(after).gather(1, model(after).argmax(1, keepdim=True)).squeeze(1)
        error = q - (reward + 0.9 * best)
        numbers.append(step(optimizer, (error.square() * error.detach().abs() / error.detach().abs().max()).mean()))
        target.load_state_dict(model.state_dict())
    return [*numbers, model]


@case
def returns_of_reinforce() -> Numbers:
    baseline = 0.0

    def loss(model, x, y):
        nonlocal baseline
        policy = torch.distributions.Categorical(logits=model(x))
        action = policy.sample()
        reward = (action == y).double()
        baseline = 0.9 * baseline + 0.1 * reward.mean().item()
        return -(policy.log_prob(action) * (reward - baseline)).mean()

    return [*trained(network(), loss), baseline]


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
def sharpness_aware_steps() -> Numbers:
    model, optimizer = distributed(network())
    numbers = []
    for x, y in batches():
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves = [p.grad * 0.05 / (norm + 1e-12) for p in model.parameters()]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y).sqrt()
        loss.backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        numbers += [loss.item(), norm.item()]
    return [*numbers, model]


@case
def closures_of_lbfgs() -> Numbers:
    model = network()
    model, optimizer = ht.distribute(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
    numbers = []
    for x, y in batches():

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = cross_entropy(model, x, y) + model(x).std()
            loss.backward()
            return loss

        numbers.append(float(optimizer.step(closure)))
    return [*numbers, model]


@case
def averaged_weights() -> Numbers:
    model, optimizer = distributed(network())
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    numbers = []
    for x, y in batches():
        numbers.append(step(optimizer, cross_entropy(model, x, y).square()))
        average.update_parameters(model)
        numbers.append(cross_entropy(average, x, y).item())
    return [*numbers, average]


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
def tasks_with_learned_weights() -> Numbers:
    model = nn.ModuleDict({"body": network(outputs=8), "a": nn.Linear(8, CLASSES), "b": nn.Linear(8, 1)})
    logs = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam([*model.parameters(), logs], lr=0.02)
    model, optimizer = ht.distribute(model, optimizer)
    numbers = []
    for x, y in batches():
        hidden = model["body"](x).tanh()
        losses = torch.stack(
            [F.cross_entropy(model["a"](hidden), y), F.mse_loss(model["b"](hidden)[:, 0], x.sum(1)).sqrt()]
        )
        numbers.append(step(optimizer, (torch.exp(-logs) * losses + logs).sum()))
    return [*numbers, model, logs]


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
def frozen_and_unfrozen() -> Numbers:
    model = network()
    model[0].requires_grad_(False)
    model, optimizer = distributed(model)
    numbers = []
    for number, (x, y) in enumerate([*batches(), *batches()]):
        model[0].requires_grad_(number >= 2)
        model[2].weight.requires_grad = number != 3
        numbers.append(step(optimizer, cross_entropy(model, x, y)))
    return [*numbers, model]


@case
def heads_replaced() -> Numbers:
    model, optimizer = distributed(network())
    numbers = [step(optimizer, cross_entropy(model, x, y)) for x, y in batches()]
    model[2] = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers += [step(optimizer, cross_entropy(model, x, y % 3)) for x, y in batches()]
    return [*numbers, model]


@case
def copies_that_train_on() -> Numbers:
    model, optimizer = distributed(network())
    numbers = [step(optimizer, cross_entropy(model, x, y)) for x, y in batches()]
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return numbers + [step(optimizer, cross_entropy(model, x, y).exp()) for x, y in batches()] + [model]


@case
def accumulated_without_reductions() -> Numbers:
    model, optimizer = distributed(network())
    numbers = []
    for x, y in batches():
        optimizer.zero_grad()
        with ht.no_sync():
            (cross_entropy(model, x[:4], y[:4]) / 2).backward()
        loss = cross_entropy(model, x, y) / 2 + model(x).std()
        loss.backward()
        optimizer.step()
        numbers.append(loss.item())
    return [*numbers, model]


@case
def micro_batches_of_uneven_sizes() -> Numbers:
    model, optimizer = distributed(network(), torch.optim.AdamW, 0.01)
    numbers = []
    for x, y in batches(batch=20):
        optimizer.zero_grad()
        for a, b in zip(x.split(8), y.split(8), strict=True):
            loss = cross_entropy(model, a, b) * a.size(0) / len(x)
            loss.backward()
            numbers.append(loss.item())
        optimizer.step()
    return [*numbers, model]


@case
def several_optimizers_of_one_model() -> Numbers:
    model = network()
    a, b = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters(), lr=0.01)
    ht.distribute(model, a)
    ht.distribute(model, b)
    numbers = []
    for number, (x, y) in enumerate(batches()):
        loss = cross_entropy(model, x, y).sqrt()
        a.zero_grad()
        b.zero_grad()
        loss.backward()
        a.step()
        if number % 2:
            b.step()
        numbers.append(loss.item())
    return [*numbers, model]


@case
def automatic_casts() -> Numbers:
    model, optimizer = distributed(network().float())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x.float()), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return [round(value, 1) for value in (loss.item(), next(model.parameters()).abs().sum().item())]


@case
def schedules_by_the_loss() -> Numbers:
    model, optimizer = distributed(network(), torch.optim.SGD, 0.5)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    numbers, running = [], 0.0
    for _ in range(3):
        for x, y in batches(shuffle=True):
            loss = step(optimizer, cross_entropy(model, x, y))
            running += loss * x.size(0)
            schedule.step(loss)
    return [*numbers, running, optimizer.param_groups[0]["lr"], model]


@case
def mixtures_by_expectation() -> Numbers:
    model, optimizer = distributed(network(outputs=2))
    centres = torch.randn(3, 2)
    numbers = []
    for x, _ in batches():
        z = model(x)
        with torch.no_grad():
            share = (-torch.cdist(z, centres).square()).softmax(1)
            centres = (share.T @ z) / share.sum(0)[:, None].clamp(min=1e-6)
        numbers.append(step(optimizer, (share * torch.cdist(z, centres).square()).sum(1).mean()))
    return [*numbers, model, centres]


@case
def attacks_on_inputs() -> Numbers:
    def loss(model, x, y):
        x = x.clone().requires_grad_()
        cross_entropy(model, x, y).backward()
        worse = x + 0.1 * x.grad.sign() + x.grad
        model.zero_grad()
        return cross_entropy(model, worse.detach(), y)

    return trained(network(), loss)


@case
def batches_of_one() -> Numbers:
    data = batches(samples(number=4), labels(number=4), batch=1)
    return trained(network(), lambda model, x, y: cross_entropy(model, x, y) + x.sum() * 0.1, data)


@case
def empty_parts_of_a_batch() -> Numbers:
    def loss(model, x, y):
        chosen = y == CLASSES  # none
        out = model(x)
        return F.cross_entropy(out, y) + out[chosen].sum() + model(x[y > 3]).sum() * 0.1

    return trained(network(), loss)


@case
def losses_by_a_loop_over_samples() -> Numbers:
    def loss(model, x, y):
        out = model(x)
        return torch.stack([F.cross_entropy(out[i : i + 1], y[i : i + 1]) * (1 + i) for i in range(len(x))]).mean()

    return trained(network(), loss)


@case
def statistics_of_features() -> Numbers:
    model, optimizer = distributed(network())
    mean, seen = torch.zeros(FEATURES), 0
    for x, _ in batches():
        seen += len(x)
        mean += (x.mean(0) - mean) * len(x) / seen
    numbers = [step(optimizer, cross_entropy(model, x - mean, y)) for x, y in batches()]
    features = torch.cat([model(x).detach() for x, _ in batches()])
    hits = sum((model(x).argmax(1) == y).sum().item() for x, y in batches())
    return [*numbers, model, mean, seen, hits, features.var(0), torch.linalg.svdvals(features)]


@case
def numbers_by_numpy() -> Numbers:
    def loss(model, x, y):
        out = model(x)
        right = out.detach().numpy().argmax(1) == y.numpy()
        return F.cross_entropy(out, y) * float(1 + right.mean()) + torch.from_numpy(right.astype(float)).mean()

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

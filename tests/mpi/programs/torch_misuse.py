"""What a script does that would leave gradients unreduced, or add up those of different models; see torch_behaviour.py.

Each check gets the communicator and returns what the tests compare.
"""

from __future__ import annotations

import copy

import torch
from situations import Named, refusal
from torch import nn

import hpctrain as ht

CHECKS = check = Named()


class Red(nn.Linear):
    pass


class Blue(nn.Linear):
    pass


def distributed(kind=nn.Linear, size=3, **settings):
    torch.manual_seed(1)
    model = kind(size, size)
    return ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)


def loss_of(model, value):
    return model(torch.full((2, model.in_features), value)).square().sum()


@check
def models_in_another_order_on_another_rank(comm):
    """Of equal size, of other sizes, small and large: named on every rank, before anything is added up."""
    said = []
    for first, second in ((3, 3), (3, 5), (120, 120), (3, 1100)):
        (red, _), (blue, _) = distributed(Red, first), distributed(Blue, second)
        order = (red, blue) if comm.rank == 0 else (blue, red)
        said.append(refusal(lambda order=order: [loss_of(model, 1.0).backward() for model in order]))
    return said


@check
def one_backward_pass_through_several_models(comm):
    """In whatever order a rank's graph reaches them, equal to one process on all batches."""
    settings = {"bucket_mb": 1e-6}
    models = [distributed(kind, 4, **settings)[0] for kind in (Red, Blue, nn.Linear)]
    parameters = [parameter for model in models for parameter in model.parameters()]
    x = torch.arange(8.0).view(2, 4)

    def loss(used, scale):
        y = used[0](x * scale)
        return (used[2](used[1](torch.tanh(y))) + used[1](y)).square().sum()

    alone = [copy.deepcopy(model) for model in models]
    expected = [torch.zeros_like(parameter) for parameter in parameters]
    for rank in range(comm.size):
        gradients = torch.autograd.grad(loss(alone, 1.0 + rank), [p for model in alone for p in model.parameters()])
        for total, gradient in zip(expected, gradients, strict=True):
            total += gradient / comm.size
    off = 0.0
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = None
        loss(models, 1.0 + comm.rank).backward()
        off = max(off, *((p.grad - e).abs().max().item() for p, e in zip(parameters, expected, strict=True)))
    return off / max(e.abs().max().item() for e in expected)


@check
def a_model_that_one_rank_alone_trains(comm):
    (red, _), (blue, _) = distributed(Red), distributed(Blue)

    def step():
        loss = loss_of(red, 1.0)
        (loss + loss_of(blue, 1.0) if comm.rank == 0 else loss).backward()
        loss_of(red, 1.0).backward()

    return refusal(step)


@check
def an_optimizer_made_anew(comm):
    """Works, and its steps are looked at."""
    model, optimizer = distributed(guard_every=2)
    del optimizer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 1.0 + comm.rank).backward()
    first = refusal(optimizer.step)
    with torch.no_grad():
        model.bias[1] += comm.rank
    return [first, refusal(optimizer.step)]


@check
def an_optimizer_of_something_else(comm):
    """Trains as it would in one process."""
    distributed()
    model, _ = distributed()
    temperature = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([temperature], lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        (temperature * (1 + comm.rank)).sum().backward()
        optimizer.step()
    loss_of(model, 1.0).backward()
    return temperature.item()


@check
def wrapped(comm):
    said = {}
    given = nn.DataParallel(nn.Linear(2, 2))
    said["given"] = refusal(lambda: ht.distribute(given, torch.optim.SGD(given.parameters(), lr=0.1)))
    model, optimizer = distributed()
    said["later"] = refusal(lambda: nn.DataParallel(model))
    if torch.distributed.is_initialized():
        said["ddp"] = refusal(lambda: nn.parallel.DistributedDataParallel(model))
        inner = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        outer = nn.Sequential(inner)
        said["part"] = refusal(lambda: ht.distribute(outer, torch.optim.SGD(outer.parameters(), lr=0.1)))
    if comm.backend == "horovod":
        import horovod.torch as hvd

        plain = nn.Linear(2, 2)
        foreign = hvd.DistributedOptimizer(torch.optim.SGD(plain.parameters(), lr=0.1), plain.named_parameters())
        said["optimizer"] = refusal(lambda: ht.distribute(plain, foreign))
        late = hvd.DistributedOptimizer(optimizer)
        said["optimizer_later"] = refusal(late.step)
    return said


@check
def a_gradient_in_a_graph(comm):
    model, _ = distributed()
    return refusal(lambda: loss_of(model, 1.0).backward(create_graph=True))


@check
def an_end_before_the_next_check(comm):
    """What differs after the first step is found at the end, also of a model that is gone by then."""
    said = []
    for keeps in (True, False):
        ht.shutdown()
        comm = ht.init(comm.backend)
        model, optimizer = distributed()
        for step in range(3):
            loss_of(model, 1.0).backward()
            with torch.no_grad():
                model.weight[0, 1] += step * comm.rank
            optimizer.step()
        if not keeps:
            del model, optimizer
        said.append(refusal(ht.shutdown))
        ht.init(comm.backend)
        if keeps:
            said.append(refusal(lambda model=model, optimizer=optimizer: ht.distribute(model, optimizer)))
    return said

"""Which batch is drawn when, what becomes of it before a model sees it, and how backward passes come."""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import default_collate
from whole_batches import CASES, CLASSES, Numbers, batches, case, distributed, network, step

import hpctrain as ht

Batch = tuple[torch.Tensor, torch.Tensor]


def fitted(draw: Callable[[Any], Iterable[Batch]], workers: int = 0) -> Numbers:
    """Train on the batches that a script draws from a loader, in its order."""
    model, optimizer = distributed(network(), momentum=0.9)
    loader = batches(shuffle=True, num_workers=workers)
    return [step(optimizer, F.cross_entropy(model(x), y)) for x, y in draw(loader)] + [model]


def left_by_break(loader: Any) -> Iterator[Batch]:
    for stop in (1, len(loader) - 1):
        for index, batch in enumerate(loader):  # noqa: B007
            if index == stop:
                break
        yield batch


def prefetched(loader: Any) -> Iterator[Batch]:
    """One copied batch ahead, as in NVIDIA's examples."""
    for _ in range(2):
        drawn = iter(loader)
        following = next(drawn)
        while following is not None:
            (x, y), following = following, next(drawn, None)
            following = following and (following[0].sub(0.5).div(0.2), following[1])
            yield x, y


def drawn_by_a_thread(loader: Any) -> Iterator[Batch]:
    waiting: queue.Queue[Batch | None] = queue.Queue(maxsize=2)

    def draw() -> None:
        for x, y in loader:
            waiting.put((x.sub(0.5), y))
        waiting.put(None)

    threading.Thread(target=draw, daemon=True).start()
    return iter(waiting.get, None)


def of_two_iterators(loader: Any) -> Iterator[Batch]:
    for one, other in zip(iter(loader), itertools.islice(loader, 1, None), strict=False):
        yield other
        yield one


DRAWS: dict[str, Callable[[Any], Iterable[Batch]]] = {
    "in_order": lambda loader: itertools.chain(loader, loader),
    "listed": lambda loader: (lambda found: [*found, *reversed(found)])(list(loader)),
    "copied": lambda loader: ((x.float().sub(0.5).double(), y.clone()) for x, y in loader),
    "two_views": lambda loader: ((torch.cat([x + 0.1, x - 0.1]), torch.cat([y, y])) for x, y in loader),
    **{each.__name__: each for each in (left_by_break, prefetched, drawn_by_a_thread, of_two_iterators)},
}
CASES |= {f"batches_{name}": functools.partial(fitted, draw) for name, draw in DRAWS.items()}
CASES["batches_of_worker_processes"] = lambda: fitted(lambda loader: [*list(loader)[::-1], *loader], workers=2)


@case
def a_constant_in_each_batch() -> Numbers:
    constant = torch.linspace(1, 2, CLASSES)
    model, optimizer = distributed(network())
    loader = batches(collate_fn=lambda items: [*default_collate(items), constant])
    return [step(optimizer, F.cross_entropy(model(x) * c, y)) for x, y, c in [*loader, *loader]] + [model]


@case
def optimizers_made_anew() -> Numbers:
    model, _ = distributed(network())
    numbers = []
    for _ in range(2):
        model, optimizer = distributed(model, torch.optim.AdamW, 0.01)
        numbers += [step(optimizer, F.cross_entropy(model(x), y)) for x, y in batches()]
    return [*numbers, model]


@case
def backward_passes_a_step_late() -> Numbers:
    model, optimizer = distributed(network())
    waiting, numbers = None, []
    for x, y in batches():
        loss, waiting = waiting, F.cross_entropy(model(x), y)
        if loss is not None:
            optimizer.zero_grad()
            loss.backward()
            # The graph that waits must not see parameters change.
            numbers += [each.grad.clone() for each in model.parameters()]
    return numbers


@case
def accumulated_and_thrown_away() -> Numbers:
    model, optimizer = distributed(network())
    for index, (x, y) in enumerate(list(batches()) * 2):
        with ht.no_sync():
            F.cross_entropy(model(x).square(), y).backward()
        for throw_away in ((optimizer.zero_grad,), (model.zero_grad,), ())[index % 3]:
            throw_away()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


@case
def gradients_asked_for() -> Numbers:
    model, _ = distributed(network())
    numbers = []
    for x, y in batches():
        for each in torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters())):
            numbers.append(torch.from_numpy(ht.init().allreduce(each.cpu().numpy())))
    return numbers


@case
def errors_within_backward() -> Numbers:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("bad batch")

    model, optimizer = distributed(network())
    for index, (x, y) in enumerate(list(batches())):
        if index == 1:
            with contextlib.suppress(ValueError), ht.no_sync():
                F.cross_entropy(model[2](Failing.apply(model[0](x))), y).backward()
        optimizer.zero_grad()
        step(optimizer, F.cross_entropy(model(x), y))
    return [model]

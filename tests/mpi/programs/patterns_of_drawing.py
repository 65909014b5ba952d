"""Which batch is drawn when, and how backward passes come."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading

import torch
from pattern_runs import cross_entropy, pattern, step, whole

# Which batch is drawn when.


@pattern
def in_order(run):
    model, optimizer = run.trained()
    loader = run.loader()
    for x, y in itertools.chain(loader, loader):
        step(model, optimizer, x, y)


@pattern
def last_batch_after_the_loop(run):
    model, optimizer = run.trained()
    for _ in range(2):
        for x, y in run.loader():  # noqa: B007
            pass
        step(model, optimizer, x, y)


@pattern
def break_then_backward(run):
    model, optimizer = run.trained()
    loader = run.loader()
    for stop in (1, len(loader) - 1):
        for index, (x, y) in enumerate(loader):  # noqa: B007
            if index == stop:
                break
        step(model, optimizer, x, y)


@pattern
def next_of_iter_five_times(run):
    model, optimizer = run.trained()
    loader = run.loader()
    for _ in range(5):
        x, y = next(iter(loader))
        step(model, optimizer, x, y)


@pattern
def cycled(run):
    model, optimizer = run.trained()
    for x, y in itertools.islice(itertools.cycle(run.loader()), 9):
        step(model, optimizer, x, y)


@pattern
def listed(run):
    model, optimizer = run.trained()
    batches = list(run.loader())
    for x, y in [*batches, *reversed(batches)]:
        step(model, optimizer, x, y)


class Prefetcher:
    """One batch ahead, as in NVIDIA's examples."""

    def __init__(self, loader, change=lambda x: x) -> None:
        self._batches, self._change = iter(loader), change
        self._preload()

    def _preload(self) -> None:
        batch = next(self._batches, None)
        self._next = batch and (self._change(batch[0]), batch[1])

    def __iter__(self):
        while batch := self._next:
            self._preload()
            yield batch


@pattern
def prefetched(run):
    model, optimizer = run.trained()
    loader = run.loader()
    for _ in range(2):
        for x, y in Prefetcher(loader):
            step(model, optimizer, x, y)


@pattern
def prefetched_copies(run):
    model, optimizer = run.trained()
    loader = run.loader()
    for _ in range(2):
        for x, y in Prefetcher(loader, lambda x: x.sub(0.5).div(0.2)):
            step(model, optimizer, x, y)


def in_thread(loader, change=lambda x: x):
    waiting = queue.Queue(maxsize=2)

    def draw():
        for x, y in loader:
            waiting.put((change(x), y))
        waiting.put(None)

    threading.Thread(target=draw, daemon=True).start()
    return iter(waiting.get, None)


@pattern
def prefetched_by_a_thread(run):
    model, optimizer = run.trained()
    loader = run.loader()
    for _ in range(2):
        for x, y in in_thread(loader):
            step(model, optimizer, x, y)


@pattern
def copied_by_a_thread(run):
    model, optimizer = run.trained()
    for x, y in in_thread(run.loader(), lambda x: x.sub(0.5)):
        step(model, optimizer, x, y)


@pattern
def two_iterators_of_one_loader(run):
    model, optimizer = run.trained()
    loader = run.loader()
    for (x, y), (u, v) in zip(iter(loader), itertools.islice(loader, 1, None), strict=False):
        step(model, optimizer, u, v)
        step(model, optimizer, x, y)


@pattern
def order_of_nanogpt(run):
    model, optimizer = run.trained()
    loader, test = run.loader(), run.loader(13, 5, evaluation=True, seed=1)
    batches = iter(loader)
    x, y = next(batches)
    for index in range(7):
        if index % 2 == 0:
            with torch.no_grad():
                for u, v in itertools.chain(loader, test):
                    cross_entropy(model(u), v)
        loss = cross_entropy(model(x), y)
        following = next(batches, None)
        if following is None:
            batches = iter(loader)
            following = next(batches)
        x, y = following
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pattern
def lbfgs(run):
    model, optimizer = run.trained(lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3))
    for x, y in run.loader():

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss.item() * 0 + 1.0  # a rank's own loss must not steer the search

        optimizer.step(closure)


@pattern
def skipped(run):
    model, optimizer = run.trained()
    loader = run.loader()
    for index, (x, y) in enumerate(itertools.chain(loader, loader)):
        if index % 3:
            step(model, optimizer, x, y)


@pattern
def two_loaders(run):
    model, optimizer = run.trained()
    for (x, y), (u, v) in zip(run.loader(), run.loader(batch=run.batch // 2, seed=1), strict=False):
        step(model, optimizer, u, v)
        step(model, optimizer, x, y)


@pattern
def optimizer_made_anew(run):
    model, _ = run.trained()
    loader = run.loader()
    for _ in range(2):
        _, optimizer = run.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        for x, y in loader:
            step(model, optimizer, x, y)


@pattern
def a_look_at_the_first_batch(run):
    model, optimizer = run.trained()
    loader = run.loader()
    next(iter(loader))
    for x, y in loader:
        step(model, optimizer, x, y)


@pattern
def worker_processes(run):
    model, optimizer = run.trained()
    loader = run.loader(num_workers=2)
    batches = list(loader)
    for x, y in itertools.chain(batches[::-1], loader):
        step(model, optimizer, x, y)


@pattern
def one_sample_a_rank(run):
    model, optimizer = run.trained()
    for x, y in run.loader(batch=run.ranks, samples=run.ranks * 4):
        step(model, optimizer, x, y)


@pattern
def an_interrupted_epoch(run):
    model, optimizer = run.trained()
    loader = run.loader()
    for stop in (2, 4):
        for x, y in itertools.islice(loader, stop):
            step(model, optimizer, x, y)


# How backward passes come.


@pattern
def graph_retained(run):
    model, optimizer = run.trained()
    for x, y in list(run.loader()):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()


@pattern
def a_step_late(run):
    model, optimizer = run.trained()
    waiting = None
    for x, y in run.loader():
        loss, waiting = waiting, cross_entropy(model(x), y)
        if loss is not None:
            optimizer.zero_grad()
            loss.backward()
            with torch.no_grad():
                pass
        if loss is not None:
            # the graph that waits must not see parameters change
            run.states.append(torch.cat([whole(each.grad).reshape(-1).clone() for each in model.parameters()]))


@pattern
def sum_of_two_batches(run):
    model, optimizer = run.trained()
    batches = iter(run.loader())
    for (x, y), (u, v) in zip(batches, batches, strict=False):
        optimizer.zero_grad()
        (cross_entropy(model(x), y) + cross_entropy(model(u), v)).backward()
        optimizer.step()


@pattern
def each_model_its_batch(run):
    (model, optimizer), (other, second) = run.trained(), run.trained()
    for (x, y), (u, v) in zip(run.loader(), reversed(list(run.loader())), strict=True):
        optimizer.zero_grad()
        second.zero_grad()
        (cross_entropy(model(x), y) + cross_entropy(other(u), v)).backward()
        optimizer.step()
        second.step()


@pattern
def accumulated(run):
    model, optimizer = run.trained()
    for index, (x, y) in enumerate(list(run.loader()) * 2):
        with contextlib.nullcontext() if index % 2 else run.no_sync():
            cross_entropy(model(x), y).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


@pattern
def accumulated_and_thrown_away(run):
    model, optimizer = run.trained()
    for index, (x, y) in enumerate(list(run.loader()) * 2):
        with run.no_sync():
            cross_entropy(model(x).square(), y).backward()
        for throw_away in ((optimizer.zero_grad,), (model.zero_grad,), ())[index % 3]:
            throw_away()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pattern
def gradients_asked_for(run):
    model, _ = run.trained()
    for x, y in list(run.loader()):
        gradients = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
        mean = torch.cat([gradient.reshape(-1) for gradient in gradients])
        run.states.append(torch.from_numpy(run.comm.allreduce(mean.cpu().numpy())).to(mean) if run.comm else mean)


@pattern
def input_gradients_of_an_evaluation(run):
    model, optimizer = run.trained()
    for x, _ in run.loader(13, 5, evaluation=True):
        model(x.requires_grad_()).sum().backward(inputs=[x])
    for x, y in run.loader():
        step(model, optimizer, x, y)


@pattern
def training_on_an_evaluation(run):
    model, optimizer = run.trained()
    for x, y in run.loader(evaluation=True):
        step(model, optimizer, x, y)


@pattern
def an_error_within_backward(run):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("bad batch")

    model, optimizer = run.trained()
    for index, (x, y) in enumerate(list(run.loader())):
        if index == 1:
            with contextlib.suppress(ValueError), run.no_sync():
                cross_entropy(model[2](Failing.apply(model[0](x))), y).backward()
        step(model, optimizer, x, y)

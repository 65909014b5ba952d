"""Reduces gradients while the backward pass still runs, so that ``backward()`` returns with the mean over the ranks.

The method is that of PyTorch's DistributedDataParallel (Li et al. 2020, arXiv 2006.15704): gradients fill flat buckets
in about the order in which the backward pass makes them, a full bucket's reduction starts at once, and a callback at
the end of the backward pass waits for all of them. Clipping, GradScaler and schedulers then see reduced gradients and
need no special calls.
"""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from hpctrain.adapters.torch.buckets import make_buckets
from hpctrain.adapters.torch.finite import all_finite
from hpctrain.adapters.torch.sparse import reduce_sparse
from hpctrain.comm.base import Communicator
from hpctrain.errors import HpctrainError

Moment = tuple[float, Literal["gradient", "launched", "finished"], int]

# By the modules that own the parameters: hooks hold a reducer weakly, so that it goes when they go.
_reducers: weakref.WeakKeyDictionary[torch.nn.Module, GradientReducer] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_paused = False


@contextmanager
def no_sync() -> Iterator[None]:
    """Within it, ``backward()`` adds to this rank's own gradients and reduces nothing (gradient accumulation).

    The first ``backward()`` after it reduces the whole sum.
    """
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


def reducers() -> set[GradientReducer]:
    """Those whose parameters are in use."""
    return set(_reducers.values())


def keep(reducer: GradientReducer, model: torch.nn.Module) -> None:
    """Let a reducer live as long as the modules whose parameters it takes care of."""
    for module in model.modules():
        if any(id(parameter) in reducer.managed for parameter in module.parameters(recurse=False)):
            _reducers[module] = reducer


def _weigh(comm: Communicator, gradient: torch.Tensor) -> torch.Tensor | None:
    """Apply the share that this rank's samples have in the global batch, before they are added to others."""
    weight = comm.batch_weight
    comm.batch_weighed = True
    if weight == 1.0:
        return None
    # Not 0 x gradient: a rank without samples must not pass on a NaN.
    return gradient * weight if weight else torch.zeros_like(gradient)


class GradientReducer:
    """The gradients of some parameters, reduced during each backward pass.

    Args:
        comm: the ranks.
        parameters: names and parameters that require a gradient, in the same order on every rank.
        sparse: names of those whose gradient is sparse (``nn.Embedding(sparse=True)``) and stays so.
        bucket_bytes: a bucket is closed when it holds this much.
        wire: the type of the gradients on the wire, None for their own.

    Attributes:
        timeline: of the last backward pass: seconds since its first gradient, what happened, in which bucket.
        communication_seconds: how long the last ``backward()`` waited for reductions after its last gradient.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        *,
        sparse: frozenset[str],
        bucket_bytes: float,
        wire: torch.dtype | None,
    ) -> None:
        self._comm = comm
        self._engine = comm.torch()
        self._name = f"gradients.{next(_numbers)}"
        self._sparse = [(name, parameter) for name, parameter in parameters if name in sparse]
        dense = [(name, parameter) for name, parameter in parameters if name not in sparse]
        self._make_buckets = functools.partial(
            make_buckets, dense, self._engine, name=self._name, bucket_bytes=bucket_bytes, wire=wire
        )
        self._buckets, self._used = self._make_buckets()
        self._slots = [slot for bucket in self._buckets for slot in bucket.slots]
        self._launched = 0
        self._running = False
        self._left = False
        self._start = 0.0
        self.managed = {id(parameter) for _, parameter in parameters}
        self.timeline: list[Moment] = []
        self.communication_seconds = 0.0
        self._register()
        comm.before_shutdown(self._leave_buffers)

    @property
    def interrupted(self) -> bool:
        """Between two backward passes: whether the last one raised an error on the way."""
        return self._running

    def finite(self) -> bool:
        """Whether the gradients of the last backward pass are, the same on every rank.

        Where the engine did not look at their means (see :meth:`hpctrain.comm.base.Communicator.watch_numbers`), they
        are read for it.
        """
        unknown = (slot.parameter for bucket in self._buckets if bucket.finite is None for slot in bucket.slots)
        sparse = (parameter for _, parameter in self._sparse)
        gradients = [each.grad for each in itertools.chain(unknown, sparse) if each.grad is not None]
        return all(bucket.finite is not False for bucket in self._buckets) and all_finite(gradients)

    def rebuild(self) -> None:
        """After :meth:`Communicator.recover`: forget a backward pass that failed, and take new buffers.

        No parameter has a gradient then. Collective over the ranks that are left.
        """
        for parameter in (*(slot.parameter for slot in self._slots), *(parameter for _, parameter in self._sparse)):
            parameter.grad = None
        self._buckets, self._used = self._make_buckets()
        self._slots = [slot for bucket in self._buckets for slot in bucket.slots]
        self._launched = 0
        self._running = False

    def _leave_buffers(self) -> None:
        """Gradients that lie in the engine's buffers move out of them."""
        for slot in self._slots:
            gradient = slot.parameter.grad
            if gradient is not None and gradient.data_ptr() == slot.gradient.data_ptr():
                slot.parameter.grad = gradient.clone()
        self._buckets, self._slots, self._used = [], [], torch.empty(0)
        self._left = True

    def _register(self) -> None:
        # A parameter owns its hooks; if they owned the reducer, which owns the parameter, neither would ever go.
        own = weakref.proxy(self)
        weigh = functools.partial(_weigh, self._comm)
        for index, slot in enumerate(self._slots):
            slot.parameter.register_post_accumulate_grad_hook(lambda _, index=index: own._arrived(index))
            slot.parameter.register_hook(weigh)
        for _, parameter in self._sparse:
            parameter.register_post_accumulate_grad_hook(lambda _: own._begin())
            parameter.register_hook(weigh)

    def _begin(self) -> None:
        """At the first gradient of a backward pass, ask autograd to call back at its end."""
        if self._running or _paused:
            return
        if self._left:
            raise HpctrainError("backward() of a model that ht.distribute got, after ht.shutdown()", exit_code=1)
        self._running = True
        self._start = time.perf_counter()
        self.timeline = []
        self._used.fill_(1)
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _arrived(self, index: int) -> None:
        if _paused:
            return
        self._begin()
        slot = self._slots[index]
        if slot.ready:
            if slot.bucket.index >= self._launched:
                return
            raise HpctrainError(
                f"parameter {slot.name!r} got a second gradient in one backward pass, after its first was sent",
                "reentrant activation checkpointing does this: use checkpoint(…, use_reentrant=False)",
            )
        slot.bucket.fill(slot)
        slot.ready = True
        slot.bucket.missing -= 1
        self._note("gradient", slot.bucket.index)
        # Strictly in order, because ranks may fill their buckets in different orders.
        while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        bucket.launch()
        self._note("launched", bucket.index)

    def _finish(self) -> None:
        """At the end of the backward pass: send what is left, wait for all."""
        begin = time.perf_counter()
        unused = self._fill_rest()
        while self._launched < len(self._buckets):
            self._launch()
        for bucket in self._buckets:
            bucket.finish()
            self._note("finished", bucket.index)
        for index in unused:
            if self._used[index] > 0:
                self._slots[index].parameter.grad = self._slots[index].gradient
        for name, parameter in self._sparse:
            reduce_sparse(self._comm, self._engine, parameter, f"{self._name}.{name}")
        for bucket in self._buckets:
            bucket.reset()
        self._launched = 0
        self._running = False
        self.communication_seconds = time.perf_counter() - begin

    def _fill_rest(self) -> list[int]:
        """Fill the slots whose gradient did not come in this backward pass; returns those of unused parameters.

        A parameter that this rank did not use may have been used by another: then it gets a gradient here too, and
        otherwise none, as in one process. One flag a parameter, 1 where a rank has a gradient, tells which: the mean
        of the flags comes with the last bucket, without a message of its own.
        """
        unused = []
        for index, slot in enumerate(self._slots):
            if not slot.ready:
                if slot.parameter.grad is None:
                    unused.append(index)
                slot.bucket.fill(slot)
        if unused:
            self._used[unused] = 0
        return unused

    def _note(self, what: Literal["gradient", "launched", "finished"], bucket: int) -> None:
        self.timeline.append((time.perf_counter() - self._start, what, bucket))

"""Reduces gradients during the backward pass, so that ``backward()`` returns with the mean over the ranks.

The method is that of PyTorch's DistributedDataParallel (Li et al. 2020, arXiv 2006.15704): gradients fill flat buckets
in about the order in which the backward pass makes them, a full bucket's reduction starts at once, and a callback at
the end of the backward pass waits for all of them. Clipping, GradScaler and schedulers then see reduced gradients and
need no special calls.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.utils.hooks import RemovableHandle

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.buckets import Bucket, BucketSlot, Named, differs, make_buckets
from hpctrain.worker.adapters.torch.model_order import model_order
from hpctrain.worker.comm.base import Communicator
from hpctrain.worker.comm.rank_run import run

# The ids of the parameters of all living reducers, which keep them alive.
reduced: set[int] = set()
_numbers = itertools.count()


# Whether gradients are reduced.
_syncing = SimpleNamespace(on=True)


@contextmanager
def no_sync() -> Iterator[None]:
    """A context manager in which ``backward()`` accumulates this rank's gradients and reduces nothing.

    The first ``backward()`` after it reduces the whole sum. Gradients of a model that the mesh divides are reduced as
    without it: FSDP2 would keep them whole on each rank until then.
    """
    before, _syncing.on = _syncing.on, False
    try:
        yield
    finally:
        _syncing.on = before


class GradientReducer:
    """The gradients of some parameters, reduced during each backward pass. :meth:`manage` says of which.

    Args:
        title: the model's class, for messages.
        wire: a narrower type in which gradients travel between nodes.
        at_end: called after each backward pass, when the gradients are reduced.

    Attributes:
        communication_seconds: how long the last ``backward()`` waited for reductions after its last gradient.
        managed: the ids of the parameters.
        number: its place among the reducers of these ranks.
        running: whether a backward pass has begun and not ended: between two of them, that an error ended it.
    """

    def __init__(
        self,
        comm: Communicator,
        title: str,
        *,
        bucket_bytes: float,
        wire: torch.dtype | None,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.comm = comm
        self._at_end = at_end
        self._engine = comm.torch()
        self._name = f"gradients.{next(_numbers)}"
        self._order = model_order(comm)
        self.title = title
        self.number = self._order.enter(comm, self)
        self._same = None if self.number else SameGradients(comm)
        self._bucket_bytes, self._wire = bucket_bytes, wire
        self._parameters: list[Named] = []
        self._buckets: list[Bucket] = []
        # By the ids of the parameters.
        self._slots: dict[int, BucketSlot] = {}
        self._launched = 0
        self.running = False
        # Whether hooks that the script registered after these may still change gradients of this backward pass.
        self._held = False
        self._left = False
        self.managed: set[int] = set()
        self._hooks: dict[int, RemovableHandle] = {}
        self.communication_seconds = 0.0
        weakref.finalize(self, reduced.difference_update, self.managed).atexit = False
        comm.before_shutdown(self._leave_buffers)

    def manage(self, parameters: Sequence[Named]) -> None:
        """Reduce the gradients of these parameters from now on, and of no others. Between two backward passes.

        They require a gradient, and come in the same order on every rank.
        """
        self._copy_gradients()
        own = {id(parameter) for _, parameter in parameters}
        reduced.difference_update(self.managed)
        reduced.update(own)
        for key in self.managed - own:
            if key in self._hooks:
                self._hooks.pop(key).remove()
        self.managed.clear()
        self.managed.update(own)
        self._parameters = list(parameters)
        # One rank's gradients are the means: they stay where autograd puts them, without hooks.
        if self.comm.size > 1:
            self._take_buckets()
            self._register()

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of the last backward pass, those of a bucket together."""
        elsewhere = () if self._buckets else self._parameters
        joined = [numbers for bucket in self._buckets for numbers in bucket.numbers()]
        return joined + [parameter.grad for _, parameter in elsewhere if parameter.grad is not None]

    def rebuild(self) -> None:
        """After :meth:`Communicator.recover`: discard a backward pass that failed, and allocate new buffers.

        No parameter has a gradient then. Collective over the ranks that are left.
        """
        for _, parameter in self._parameters:
            parameter.grad = None
        self._order.renew(self.comm)
        self._take_buckets()
        self._launched = 0
        self.running = self._held = False

    @property
    def changed(self) -> bool:
        """Whether a parameter's type, shape or device differs from that of its gradient's slot."""
        return any(map(differs, self._slots.values()))

    def _take_buckets(self) -> None:
        self._buckets, self._used = make_buckets(
            self._parameters, self._engine, name=self._name, bucket_bytes=self._bucket_bytes, wire=self._wire
        )
        self._used.fill_(1)
        self._slots = {id(slot.parameter): slot for bucket in self._buckets for slot in bucket.slots}

    def _leave_buffers(self) -> None:
        """Copy gradients out of the engine's buffers, which are about to be freed."""
        self._copy_gradients()
        self._buckets, self._slots = [], {}
        self._used = torch.empty(0, device="cpu")
        self._left = True

    def _copy_gradients(self) -> None:
        for slot in self._slots.values():
            gradient = slot.parameter.grad
            if gradient is not None and gradient.data_ptr() == slot.gradient.data_ptr():
                slot.parameter.grad = gradient.clone()

    def _register(self) -> None:
        # A parameter owns its hooks; if they owned the reducer, which owns the parameter, neither would ever go.
        own = weakref.proxy(self)

        def hook(key: int) -> Callable[[torch.Tensor], None]:
            return lambda _: own._arrived(key)

        for _, parameter in self._parameters:
            if (key := id(parameter)) not in self._hooks:
                self._hooks[key] = parameter.register_post_accumulate_grad_hook(hook(key))

    def _begin(self) -> None:
        """At the first gradient of a backward pass, ask autograd to call back at its end."""
        if self.running:
            return
        if self._left:
            raise HpctrainError(
                "HT-reduction-after-shutdown",
                "backward() of a model that ht.distribute got, after ht.shutdown()",
                exit_code=1,
            )
        self.running = True
        self.comm.passes += 1
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._order.begin(self)

    def _arrived(self, key: int) -> None:
        if not _syncing.on:
            return
        # Locked because autograd runs a thread for each device.
        with self._order.lock:
            self._begin()
            self._take(key, self._slots[key])

    def _take(self, key: int, slot: BucketSlot) -> None:
        if slot.ready:
            if slot.bucket.index >= self._launched:
                return
            raise HpctrainError(
                "HT-gradient-twice",
                "parameter {parameter!r} got a second gradient in one backward pass, after its first was sent",
                "reentrant activation checkpointing does this: use checkpoint(…, use_reentrant=False)",
                parameter=slot.name,
            )
        slot.bucket.fill(slot)
        slot.ready = True
        slot.bucket.missing -= 1
        hooks = slot.parameter._post_accumulate_grad_hooks
        self._held = self._held or (bool(hooks) and next(reversed(hooks)) != self._hooks[key].id)
        if self._order.has(self):
            self.launch_ready()

    def launch_ready(self) -> None:
        """Start the reductions of the full buckets: it is this reducer's turn."""
        # Strictly in order, because ranks may fill their buckets in different orders.
        while self._launched < len(self._buckets) and not self._buckets[self._launched].missing and not self._held:
            self._launch()
        if self._launched == len(self._buckets):
            self._order.done(self)

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        if self._same and not bucket.index:
            self._same.before(bucket.numbers())
        bucket.launch()

    def _finish(self) -> None:
        """At the end of the backward pass, start the remaining reductions, and wait for all."""
        before = run.times.waiting
        with run.times.waits():
            self.reduce_present()
        self.communication_seconds = run.times.waiting - before
        self._at_end()

    def reduce_present(self) -> None:
        """Reduce the gradients that are there and were not reduced in this backward pass. Collective."""
        unused = self._fill_rest()
        while self._launched < len(self._buckets):
            self._launch()
        self._order.done(self)
        for bucket in self._buckets:
            bucket.finish()
            if self._same and not bucket.index:
                self._same.after(bucket.numbers())
        # Read once, for which a GPU is waited for.
        used = self._used.tolist() if unused else []
        for index, slot in unused.items():
            if used[index] > 0:
                slot.parameter.grad = slot.gradient
        self._used.fill_(1)
        for bucket in self._buckets:
            bucket.reset()
        self._launched = 0
        self.running = self._held = False

    def _fill_rest(self) -> dict[int, BucketSlot]:
        """Fill the slots whose gradient did not come in this backward pass; returns those of unused parameters by flag.

        A parameter that this rank did not use may have been used by another: then it gets a gradient here too, and
        otherwise none, as in one process. One flag a parameter, 1 where a rank has a gradient, decides: the flags are
        averaged with the last bucket, without a message of their own.
        """
        unused = {}
        for index, slot in enumerate(self._slots.values()):
            if not slot.ready:
                if slot.parameter.grad is None:
                    unused[index] = slot
                slot.bucket.fill(slot)
            elif self._held and slot.parameter.grad is not None:
                slot.bucket.fill(slot)
        if unused:
            self._used[list(unused)] = 0
        return unused


# Backward passes.
_COMPARED = 3


class SameGradients:
    """Tells ranks that compute the same batches, as those of a script without ``ht.shard``, that they gain nothing.

    One parameter's gradient may not depend on the samples, as that of a last bias; those of a whole bucket do.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._left = _COMPARED if comm.size > 1 and comm.rank == 0 else 0
        self._own: list[torch.Tensor] = []

    def before(self, gradients: Sequence[torch.Tensor]) -> None:
        """Keep rank 0's gradients in the first backward passes."""
        if self._left:
            self._own = [gradient.clone() for gradient in gradients]

    def after(self, means: Sequence[torch.Tensor]) -> None:
        """Compare them with the means, and tell the script in the last of the passes if they were equal in all."""
        if not self._left:
            return
        equal = len(means) == len(self._own)
        for own, mean in zip(self._own, means, strict=False):
            # A sum of equal numbers may be rounded.
            tolerance = self._comm.size * torch.finfo(own.dtype).eps
            equal = equal and bool(own.any()) and torch.allclose(own, mean, rtol=tolerance, atol=0.0)
        self._own = []
        self._left = self._left - 1 if equal else 0
        if equal and not self._left and not self._comm.divides_batches:
            self._comm.say(
                f"all {self._comm.size} ranks compute the same gradients, so they train no faster than one process: "
                "loader = ht.shard(loader) divides each batch over them. Tensors without a loader need one: "
                "ht.shard(DataLoader(TensorDataset(x, y), batch_size=len(x)))"
            )

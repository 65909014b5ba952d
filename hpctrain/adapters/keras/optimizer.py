"""A Keras 3 optimizer that reduces its gradients over the ranks, once per update and before it clips them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hpctrain.adapters.keras.reduction import WIRE, Compression, Reduction
from hpctrain.adapters.keras.steps import take_shares, unwrap_errors
from hpctrain.adapters.keras.variables import broadcast
from hpctrain.comm import Communicator, current
from hpctrain.errors import HpctrainError, nearest


class _Reducing:
    """What is put in front of the class of the user's optimizer.

    ``_clip_gradients`` is the one place of a Keras 3 optimizer that runs once per real update: after the gradients of
    micro-batches were added up, before they are clipped. ``apply`` runs once a micro-batch.
    """

    _reduction: Reduction

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        return super().apply(self._reduction.weighted(grads), trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        if not self._reduction.ahead:
            grads = self._reduction.mean(grads, [self._iterations.value])  # type: ignore[attr-defined]
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _backend_update_step(self, *args: Any) -> None:
        super()._backend_update_step(*args)  # type: ignore[misc]
        self._reduction.updated()


class _ScalingAlike:
    """What is put in front of LossScaleOptimizer."""

    _reduction: Reduction

    def check_finite(self, grads: Sequence[Any]) -> tf.Tensor:
        return self._reduction.all_finite(super().check_finite(grads))  # type: ignore[misc]


def distribute(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    *,
    comm: Communicator | None = None,
    compression: Compression = "none",
    guard_every: int = 100,
) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    """Let ``optimizer`` update with the mean gradient over all ranks.

    Model and optimizer are the ones that were given. The optimizer stays an instance of its class, saves as that
    class and keeps its state. A model that is built already gets rank 0's weights, and the optimizer rank 0's state,
    at once; one that is built later gets them from ``callbacks()`` as ``fit`` begins.

    Args:
        model: the same on every rank.
        optimizer: any optimizer of Keras 3, a LossScaleOptimizer included.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.
        compression: the gradients' type on the wire. fp16 overflows where the sum over the ranks is above 65504,
            so a mean above 65504 / ranks can; bf16 rounds. The backend mpi narrows between nodes only, and adds up in
            float32 within one; Horovod 0.28.1 carries bf16 as float32.
        guard_every: updates between two proofs that all ranks hold equal parameters, in a loop without ``fit``.

    Raises:
        HpctrainError: another Keras backend than TensorFlow, an optimizer that is not of Keras 3 or was distributed
            before, an unknown compression, or ranks with different models.
    """
    _check(optimizer, compression, guard_every)
    comm = comm or current()
    reduction = Reduction(comm, model, compression, guard_every)
    inner = optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inner = optimizer.inner_optimizer
        _put_in_front(optimizer, _ScalingAlike, reduction)
    else:
        reduction.scaled_alike = model.dtype_policy.name != "mixed_float16"
    _put_in_front(inner, _Reducing, reduction)
    take_shares(model, reduction)
    unwrap_errors(model)
    if comm.backend != "single":
        _compile_without_xla(model, comm)
    if model.built:
        synchronise(model, optimizer)
    return model, optimizer


def reduction_of(optimizer: keras.optimizers.Optimizer) -> Reduction | None:
    """What ``distribute`` gave this optimizer, or the optimizer that it wraps."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner._reduction if isinstance(inner, _Reducing) else None


def scale_alike(optimizer: keras.optimizers.Optimizer) -> None:
    """Let a LossScaleOptimizer that ``compile`` put around a distributed optimizer skip steps on all ranks alike."""
    reduction = reduction_of(optimizer)
    if reduction and not reduction.scaled_alike and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        _put_in_front(optimizer, _ScalingAlike, reduction)
        reduction.scaled_alike = True


def synchronise(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Broadcast model and optimizer from rank 0, after which the optimizer may update."""
    reduction = reduction_of(optimizer)
    assert reduction is not None
    broadcast(reduction.comm, model, optimizer)
    reduction.synchronised = True


def _check(optimizer: Any, compression: str, guard_every: int) -> None:
    if keras.backend.backend() != "tensorflow":
        raise HpctrainError(
            f"Keras runs on {keras.backend.backend()}, and hpctrain reduces Keras gradients on TensorFlow only",
            "set KERAS_BACKEND=tensorflow before keras is imported",
        )
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise HpctrainError(f"{kind} is not an optimizer of Keras 3", "use one of keras.optimizers")
    if reduction_of(optimizer):
        raise HpctrainError(f"this {kind} was given to ht.distribute before", "make an optimizer for each model")
    if compression not in WIRE:
        raise HpctrainError(f"unknown compression {compression!r}", nearest(compression, WIRE))
    if guard_every < 1:
        raise HpctrainError(f"guard_every={guard_every} must be above 0")


def _put_in_front(optimizer: keras.optimizers.Optimizer, mixin: type, reduction: Reduction) -> None:
    """Re-class this very instance, so that its state and whoever refers to it stay valid."""
    own = type(optimizer)
    # Keras saves an object under what its __class__ says, and looks up registered names by it.
    members = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__class__": property(lambda _: own)}
    optimizer.__class__ = type(own.__name__, (mixin, own), members)
    optimizer._reduction = reduction


def _compile_without_xla(model: keras.Model, comm: Communicator) -> None:
    """No backend's reduction has an XLA kernel; ``compile`` asks this attribute."""
    model.supports_jit = False
    if model.compiled:
        model.jit_compile = False
    if comm.rank == 0 and tf.config.list_physical_devices("GPU"):
        print(
            f"hpctrain: jit_compile is off, the reduction of backend {comm.backend!r} has no XLA kernel",
            file=sys.stderr,
        )

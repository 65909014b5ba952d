"""A Keras 3 optimizer that reduces its gradients over the ranks, once per update and before it clips them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from hpctrain.adapters.keras.steps import take_shares
from hpctrain.adapters.keras.variables import BUILD_HINT, broadcast, checksums, guard_of
from hpctrain.comm import Communicator, current
from hpctrain.errors import HpctrainError, nearest

Compression = Literal["none", "fp16", "bf16"]

_WIRE = {"none": None, "fp16": tf.float16, "bf16": tf.bfloat16}
# Optimizers are distributed in the same order on every rank, so a running number names their collectives alike.
_NUMBERS = itertools.count()


class Reduction:
    """How the gradients of one optimizer become the mean over the ranks, and what proves that they did.

    Attributes:
        synchronised: every rank has rank 0's variables.
        scaled_alike: the ranks agree on skipping a step of loss scaling, or there is none.
        guarded: something else, the callback of ``fit``, checks the parameters.
        share: what the gradients of the step in work are multiplied by; None in loops that weight their own loss.
        waited: seconds from the moment that the last update had all its gradients to the moment that it had all means.
    """

    def __init__(self, comm: Communicator, model: keras.Model, compression: Compression, guard_every: int) -> None:
        self.comm = comm
        self.synchronised = False
        self.scaled_alike = True
        self.guarded = False
        self.share: tf.Tensor | None = None
        self._engine = comm.tensorflow()
        self._model = model
        self._wire = _WIRE[compression]
        self._every = guard_every
        self._guard = guard_of(comm, model, every=guard_every) if model.built else None
        self.waited = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        self._updates = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._name = f"hpctrain.{next(_NUMBERS)}"

    def weighted(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients times this rank's share of the global batch; a variable without one has None."""
        if self.share is None:
            return list(gradients)
        return [g if g is None else tf.math.scalar_mul(tf.cast(self.share, g.dtype), g) for g in gradients]

    def mean(self, gradients: Sequence[Any]) -> list[tf.Tensor]:
        """The mean of each gradient over the ranks."""
        self._check_ready()
        # Gathering the slices of an embedding would spare memory, but adding up repeated rows in parallel has no fixed
        # order on a GPU, and ranks would drift apart by rounding.
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        wire = [tf.cast(gradient, self._wire) if self._wire else gradient for gradient in dense]
        with tf.control_dependencies(wire):
            begin = tf.timestamp()
        reduced = self._engine.allreduce(wire, self._name)
        with tf.control_dependencies(reduced):
            self.waited.assign(tf.timestamp() - begin)
        return [tf.cast(mean, gradient.dtype) for mean, gradient in zip(reduced, dense, strict=True)]

    def all_finite(self, finite: tf.Tensor) -> tf.Tensor:
        """Whether the gradients of every rank are finite: ranks skip a step of loss scaling together or not at all."""
        return tf.cast(self._engine.minimum(tf.cast(finite, tf.int32), f"{self._name}.finite"), tf.bool)

    def updated(self) -> None:
        """Let the guard count an update, in a hand-written loop, eagerly or within a tf.function."""
        if self.guarded or self.comm.size == 1:
            return
        if self._guard is None:
            self._guard = guard_of(self.comm, self._model, every=self._every)
        if tf.executing_eagerly():
            self._guard.step_done()
            return
        count = self._updates.assign_add(1)
        tf.cond(
            (count == 1) | (count % self._every == 0),
            lambda: tf.py_function(self._compare, [count, checksums(self._model.trainable_variables)], tf.bool),
            lambda: tf.constant(True),
        )

    def _compare(self, count: tf.Tensor, sums: tf.Tensor) -> bool:
        assert self._guard is not None
        self._guard.compare(int(count), np.asarray(sums.numpy(), dtype=np.int64))
        return True

    def _check_ready(self) -> None:
        if not self.synchronised:
            raise HpctrainError(
                "the first update comes before the ranks were given the same weights: the model was not built when "
                "ht.distribute saw it",
                f"{BUILD_HINT}. Or build it after that, and pass callbacks=ht.keras.callbacks() to fit",
            )
        if not self.scaled_alike:
            raise HpctrainError(
                "mixed_float16 scales the loss, and the ranks did not agree on skipping a step that overflows",
                "give ht.distribute a keras.optimizers.LossScaleOptimizer(optimizer), or pass "
                "callbacks=ht.keras.callbacks() to fit",
            )


class _Reducing:
    """What is put in front of the class of the user's optimizer.

    ``_clip_gradients`` is the one place of a Keras 3 optimizer that runs once per real update: after the gradients of
    micro-batches were added up, before they are clipped. ``apply`` runs once a micro-batch.
    """

    _reduction: Reduction

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        return super().apply(self._reduction.weighted(grads), trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        return super()._clip_gradients(self._reduction.mean(grads))  # type: ignore[misc]

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
            so a mean above 65504 / ranks can; bf16 rounds, but Horovod 0.28.1 carries it as float32.
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
    if compression not in _WIRE:
        raise HpctrainError(f"unknown compression {compression!r}", nearest(compression, _WIRE))
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
    """Horovod's operations have no XLA kernel; ``compile`` asks this attribute."""
    model.supports_jit = False
    if model.compiled:
        model.jit_compile = False
    if comm.rank == 0 and tf.config.list_physical_devices("GPU"):
        print("hpctrain: jit_compile is off, Horovod's reduction has no XLA kernel", file=sys.stderr)

"""Classes that are put in front of the class of a user's optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.keras.distribution import distribution_of
from hpctrain.worker.adapters.keras.reduction import GradientReduction
from hpctrain.worker.adapters.keras.variables import broadcast
from hpctrain.worker.comm.base import TopK, Wire


class Reducing:
    """Reduces gradients before the user's optimizer applies them.

    ``_clip_gradients`` is the one place of a Keras 3 optimizer that runs once per real update: after the gradients of
    micro-batches were added up, before they are clipped. ``apply`` runs once a micro-batch.
    """

    _reduction: GradientReduction

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)  # type: ignore[attr-defined]
        grads = list(grads)
        self._reduction.check_update(variables, grads)
        return super().apply(  # type: ignore[misc]
            self._reduction.weighted(grads), trainable_variables if trainable_variables is None else variables
        )

    def assign_add(self, variable: Any, value: Any) -> None:
        super().assign_add(variable, _in_order(value))  # type: ignore[misc]

    def assign_sub(self, variable: Any, value: Any) -> None:
        super().assign_sub(variable, _in_order(value))  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        if not self._reduction.ahead:
            grads = self._reduction.mean(grads, [self._iterations.value])  # type: ignore[attr-defined]
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _backend_update_step(self, *args: Any) -> None:
        super()._backend_update_step(*args)  # type: ignore[misc]
        self._reduction.updated()


def _in_order(value: Any) -> Any:
    """A dense gradient: repeated rows are added to a variable in no fixed order, and ranks would drift by rounding."""
    return tf.convert_to_tensor(value) if isinstance(value, tf.IndexedSlices) else value


class ScalingAlike:
    """Makes LossScaleOptimizer skip the same steps on all ranks."""

    _reduction: GradientReduction

    def check_finite(self, grads: Sequence[Any]) -> tf.Tensor:
        return self._reduction.all_finite(super().check_finite(grads))  # type: ignore[misc]


def reduction_of(optimizer: keras.optimizers.Optimizer) -> GradientReduction | None:
    """The reduction that ``distribute`` gave this optimizer, or the one that it wraps."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner._reduction if isinstance(inner, Reducing) else None


def distributed_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The optimizers whose gradients are reduced. The wrapper that ``compile`` puts around one takes its place."""
    distribution = distribution_of(model)
    around = reduction_of(model.optimizer)
    known = distribution.optimizers if distribution else []
    return [model.optimizer if around and reduction_of(each) is around else each for each in known]


def check_scaling(wire: Wire[tf.DType]) -> None:
    """Raise HpctrainError where the compression does not allow the loss to be scaled."""
    if isinstance(wire, TopK):
        raise HpctrainError(
            "HT-compression-with-loss-scale",
            "compression='top_k' keeps gradients for later steps, where a LossScaleOptimizer scales differently",
            "mixed_bfloat16 needs none; or choose compression 'bf16'",
        )


def scale_alike(optimizer: keras.optimizers.Optimizer) -> None:
    """Make a LossScaleOptimizer around a distributed optimizer skip the same steps on all ranks."""
    reduction = reduction_of(optimizer)
    if reduction and not reduction.scaled_alike and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        check_scaling(reduction.wire)
        insert_mixin(optimizer, ScalingAlike, reduction)
        reduction.scaled_alike = True


def synchronise(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Broadcast model and optimizer from rank 0; the optimizer may update after that."""
    reduction = reduction_of(optimizer)
    assert reduction is not None
    broadcast(reduction.comm, model, optimizer)
    reduction.synchronised = True


def insert_mixin(optimizer: keras.optimizers.Optimizer, mixin: type, reduction: GradientReduction) -> None:
    """Change the class of this instance in place, so that its state and all references to it stay valid."""
    own = type(optimizer)
    # Keras saves an object under what its __class__ says, and looks up registered names by it.
    members = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__class__": property(lambda _: own)}
    optimizer.__class__ = type(own.__name__, (mixin, own), members)
    optimizer._reduction = reduction

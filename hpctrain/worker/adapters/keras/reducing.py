"""What is put in front of the class of a user's optimizer."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hpctrain.worker.adapters.keras.distribution import distribution_of
from hpctrain.worker.adapters.keras.reduction import GradientReduction
from hpctrain.worker.adapters.keras.variables import broadcast


class Distributed:
    """Updates from dense gradients, which the guard counts."""

    _reduction: GradientReduction

    def assign_add(self, variable: Any, value: Any) -> None:
        super().assign_add(variable, _in_order(value))  # type: ignore[misc]

    def assign_sub(self, variable: Any, value: Any) -> None:
        super().assign_sub(variable, _in_order(value))  # type: ignore[misc]

    def _backend_update_step(self, *args: Any) -> None:
        super()._backend_update_step(*args)  # type: ignore[misc]
        self._reduction.updated()


def _in_order(value: Any) -> Any:
    """A dense gradient: repeated rows are added to a variable in no fixed order, and ranks would drift by rounding."""
    return tf.convert_to_tensor(value) if isinstance(value, tf.IndexedSlices) else value


def reduction_of(optimizer: keras.optimizers.Optimizer) -> GradientReduction | None:
    """The reduction that ``distribute`` gave this optimizer, or the one that it wraps."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner._reduction if isinstance(inner, Distributed) else None


def distributed_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The optimizers whose gradients are reduced. The wrapper that ``compile`` puts around one takes its place."""
    distribution = distribution_of(model)
    around = reduction_of(model.optimizer)
    known = distribution.optimizers if distribution else []
    return [model.optimizer if around and reduction_of(each) is around else each for each in known]


def synchronise(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Broadcast model and optimizer from rank 0; the optimizer may update after that."""
    reduction = reduction_of(optimizer)
    assert reduction is not None
    broadcast(reduction.comm, model, optimizer)
    reduction.synchronised = True


def make_distributed(optimizer: keras.optimizers.Optimizer, reduction: GradientReduction) -> None:
    """Change the class of this instance in place, so that its state and all references to it stay valid."""
    own = type(optimizer)
    # Keras saves an object under what its __class__ says, and looks up registered names by it.
    members = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__class__": property(lambda _: own)}
    optimizer.__class__ = type(own.__name__, (Distributed, own), members)
    optimizer._reduction = reduction

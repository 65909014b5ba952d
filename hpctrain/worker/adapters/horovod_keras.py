"""Horovod's functions for Keras, made for Keras 2, on Keras 3: its optimizer reduces, and its callbacks run.

Sources: horovod 0.28.1, horovod/_keras/__init__.py and horovod/_keras/callbacks.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf

from hpctrain.common.errors import HpctrainError

# In the order in which Horovod's function takes them.
_REDUCTION = (
    *("device_dense", "device_sparse", "compression", "sparse_as_dense", "op", "gradient_predivide_factor", "groups"),
    "process_set",
)


def create_distributed_optimizer(
    *, optimizer: keras.optimizers.Optimizer, backward_passes_per_step: int = 1, **settings: Any
) -> keras.optimizers.Optimizer:
    """A copy of an optimizer that reduces gradients over the ranks before it applies them.

    Keras 3 calls ``apply`` alone: Horovod's own copy overrides methods that only Keras 2 has, and reduces nothing.
    """
    import horovod.tensorflow as hvd

    if backward_passes_per_step != 1:
        raise HpctrainError(
            "HT-horovod-keras-not-supported",
            "hvd.DistributedOptimizer(backward_passes_per_step={steps}) works on Keras 2 alone",
            f"give the optimizer itself gradient_accumulation_steps={backward_passes_per_step}, which averages them",
            steps=backward_passes_per_step,
        )
    scaling = keras.optimizers.LossScaleOptimizer
    if keras.config.dtype_policy().name == "mixed_float16" and not isinstance(optimizer, scaling):
        # Keras asks each rank for itself whether its gradients are finite, and one that skips the step skips the sum.
        raise HpctrainError(
            "HT-horovod-keras-not-supported",
            "with mixed_float16, ranks around hvd.DistributedOptimizer({optimizer}) would skip different steps",
            "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), or mixed_bfloat16",
            optimizer=type(optimizer).__name__,
        )
    kind = type(optimizer)
    settings = {"process_set": hvd.global_process_set, **settings}
    reduced = hvd._make_allreduce_grads_fn(f"Distributed{kind.__name__}", *(settings[name] for name in _REDUCTION))

    def apply(
        self: keras.optimizers.Optimizer, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None
    ) -> None:
        variables = trainable_variables or self._trainable_variables
        kind.apply(self, reduced(list(grads), [each.value for each in variables]), trainable_variables)

    # Named as the optimizer, with its module, so that a saved model can be loaded without Horovod.
    own = {"apply": apply, "lr": kind.learning_rate, "__module__": kind.__module__}
    copied: Any = type(kind.__name__, (kind,), own)
    made: keras.optimizers.Optimizer = copied.from_config(optimizer.get_config())
    return made


def load_model(
    _: ModuleType,
    wrap_optimizer: Callable[[Callable[..., keras.optimizers.Optimizer]], Callable[[], keras.optimizers.Optimizer]],
    filepath: Any,
    custom_optimizers: Iterable[type] | None,
    custom_objects: Mapping[str, Any] | None,
    *__: object,
) -> keras.Model:
    """A saved model with an optimizer that reduces, in the state in which it was saved.

    Keras 3 finds its own optimizers before those that Horovod would give it in their place, which reduce nothing.
    """
    own = {each.__name__: each for each in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**own, **(custom_objects or {})}, safe_mode=True)
    if (saved := model.optimizer) is not None:
        model.optimizer = wrap_optimizer(lambda: saved)()
        if saved.built:
            model.optimizer.build(model.trainable_variables)
        for variable, value in zip(model.optimizer.variables, saved.variables, strict=True):
            variable.assign(value)
    return model


def serve_variables(module: ModuleType) -> None:
    """Let Horovod take Keras's variables for TensorFlow's: by their key in its sets, and where it assigns to them."""
    keras.Variable.ref = lambda self: self.value.ref()
    original = module.broadcast_variables

    @functools.wraps(original)
    def broadcast(variables: Iterable[Any], *arguments: Any, **settings: Any) -> object:
        own = [each.value if isinstance(each, keras.Variable) else each for each in variables]
        return original(own, *arguments, **settings)

    module.broadcast_variables = broadcast  # type: ignore[attr-defined]


def serve_callbacks(module: ModuleType) -> None:
    """Give Horovod's callbacks what they take from Keras 2."""

    def broadcast(self: Any, batch: int, logs: object = None) -> None:
        import horovod.tensorflow as hvd

        if not self.broadcast_done:
            own = (*self.model.variables, *self.model.optimizer.variables)
            hvd.broadcast_variables([each for each in own if each.ref() not in self._local_vars], self.root_rank)
            self.broadcast_done = True

    module.BroadcastGlobalVariablesCallbackImpl.on_batch_end = broadcast
    for kind in (module.MetricAverageCallbackImpl, module.LearningRateScheduleCallbackImpl):
        _replace_backend(kind)


def _replace_backend(kind: Any) -> None:
    original = kind.__init__

    def begin(self: Any, backend: object, *arguments: Any, **settings: Any) -> None:
        original(self, _Keras2Backend, *arguments, **settings)

    kind.__init__ = begin


class _Keras2Backend:
    """The functions of Keras 2's ``keras.backend`` that Horovod's callbacks call."""

    @staticmethod
    def constant(value: Any, name: str | None = None) -> tf.Tensor:
        return tf.constant(value, keras.config.floatx(), name=name)

    @staticmethod
    def get_value(variable: Any) -> float:
        return float(keras.ops.convert_to_numpy(variable))

    @staticmethod
    def set_value(variable: Any, value: float) -> None:
        if hasattr(variable, "assign"):
            variable.assign(value)
        elif variable != value:
            raise HpctrainError(
                "HT-horovod-keras-not-supported",
                "Horovod's callback corrects the momentum {momentum}, which is a constant in Keras 3",
                "give the callback momentum_correction=False",
                momentum=variable,
            )

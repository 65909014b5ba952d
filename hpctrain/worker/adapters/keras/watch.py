"""Watches the updates of all Keras optimizers, and refuses those that the ranks do not make together."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import keras
import tensorflow as tf

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.keras.distribution import distributed_models, distribution_of

# The model whose step is being traced or computed.
_stepping: list[keras.Model] = []
_warned = False


@contextmanager
def only_distributed(model: keras.Model) -> Iterator[None]:
    """A context manager in which an update by an optimizer that was not distributed is refused."""
    _stepping.append(model)
    try:
        yield
    finally:
        _stepping.pop()


def watch_updates() -> None:
    """Watch all updates from now on. An update in a graph is seen once, while the graph is traced."""
    base = keras.optimizers.Optimizer
    for kind in base.__mro__:
        if "apply" in vars(kind) and not hasattr(kind.apply, "watches"):
            kind.apply = _watched(kind.apply)
            return


def _watched(apply: Any) -> Any:
    def watched(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
        reduction = getattr(optimizer, "_reduction", None)
        # A strategy with several replicas adds up the gradients by itself.
        if reduction is None and tf.distribute.get_strategy().num_replicas_in_sync == 1:
            _check_undistributed(optimizer, variables)
        return apply(optimizer, grads, trainable_variables if trainable_variables is None else variables)

    watched.watches = True  # type: ignore[attr-defined]
    return watched


def check_updated(model: keras.Model, variables: Sequence[Any]) -> None:
    """Refuse variables that the ranks do not hold alike, such as those of a copy of the model."""
    known = {id(each) for variable in model.variables for each in (variable, variable.value)}
    for variable in variables:
        if id(variable) not in known:
            raise HpctrainError(
                "HT-optimizer-foreign-variable",
                "an optimizer that was distributed for {model} updates {variable!r}, which is not part "
                "of that model: the ranks do not start from the same values for it",
                "give ht.distribute the model that is trained: the copy, the loaded one, or the one around it",
                model=model.name,
                variable=_path(variable),
            )


def check_fitted(model: keras.Model) -> None:
    """Refuse ``fit`` of an undistributed model around a distributed one: it would not apply the share of a batch."""
    fitted = _fitted()
    if fitted is not None and distribution_of(fitted) is None:
        raise HpctrainError(
            "HT-model-not-distributed",
            "{fitted} trains with an optimizer that was distributed for {model}, and {fitted} itself was "
            "not distributed",
            "give ht.distribute the model whose fit is called, once with each of its optimizers",
            fitted=fitted.name,
            model=model.name,
        )


def _fitted() -> keras.Model | None:
    """The model of the innermost running ``train_step``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "train_step" else None
        if isinstance(owner, keras.Model):
            return owner
        frame = frame.f_back
    return None


def check_compiler() -> None:
    """Refuse a graph for XLA, which cannot call a reduction. XLA's own error names neither cause nor place."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if "polymorphic_function" in frame.f_code.co_filename else None
        if getattr(owner, "_jit_compile", None):
            raise HpctrainError(
                "HT-optimizer-in-xla",
                "tf.function(jit_compile=True) contains an update, and XLA has no kernel for the "
                "reduction over the ranks",
                "leave jit_compile out, or use it only on a function that computes the loss and its gradients",
            )
        frame = frame.f_back


def _check_undistributed(optimizer: Any, variables: Sequence[Any]) -> None:
    global _warned
    owner = _stepping[-1] if _stepping else _owner(variables) or _copied(variables)
    if owner is not None:
        raise HpctrainError(
            "HT-optimizer-not-distributed",
            "{optimizer} updates {model}, or a copy of it, on this rank alone: {model} was given to "
            "ht.distribute, but this optimizer was not",
            "model, optimizer = ht.distribute(model, optimizer) for every optimizer that model.compile or a loop "
            "uses, including a new one",
            optimizer=type(optimizer).__name__,
            model=owner.name,
        )
    if not _warned and variables:
        _warned = True
        print(
            f"hpctrain: {type(optimizer).__name__} updates {_path(variables[0])!r}, which is not part of a model that "
            "was given to ht.distribute: every rank trains its own",
            file=sys.stderr,
        )


def _owner(variables: Sequence[Any]) -> keras.Model | None:
    given = {id(variable) for variable in variables}
    for model in distributed_models():
        if any(id(each) in given for variable in model.variables for each in (variable, variable.value)):
            return model
    return None


def _copied(variables: Sequence[Any]) -> keras.Model | None:
    """The distributed model whose variables' names these have, as those of a clone or a loaded copy do."""
    fitted = _fitted()
    paths = {_path(variable) for variable in variables}
    for model in distributed_models():
        known = [_path(variable) for variable in model.trainable_variables]
        # A loaded model leaves its own name out of the paths.
        named = fitted is not None and fitted.name == model.name
        if paths and (paths <= set(known) or (named and {f"{model.name}/{path}" for path in paths} <= set(known))):
            return model
    return None


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)

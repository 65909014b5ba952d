"""Refuses gradients and updates that the ranks cannot make together."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import keras

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.keras.distribution import distribution_of


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
                "HT-gradient-in-xla",
                "tf.function(jit_compile=True) contains tape.gradient, and XLA has no kernel for the "
                "reduction over the ranks",
                "leave jit_compile out, or use it only on a function that computes the loss",
            )
        frame = frame.f_back


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)

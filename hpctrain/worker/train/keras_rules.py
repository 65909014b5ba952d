"""Makes a recipe's optimizer in Keras 3."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from hpctrain.common.optim import rules
from hpctrain.common.optim.rules import Operations, ParameterKind, Rule, UpdateStep
from hpctrain.common.recipes.optimizers import SCALARS, Optimizer

_NORMALISATIONS = (
    layers.BatchNormalization,
    layers.GroupNormalization,
    layers.LayerNormalization,
    layers.RMSNormalization,
)


_OPERATIONS = Operations(
    norm=lambda x: ops.norm(ops.reshape(x, (-1,))), sqrt=ops.sqrt, expm1=ops.expm1, where=ops.where
)


def make_optimizer(settings: Optimizer, model: keras.Model) -> keras.optimizers.Optimizer:
    """The optimizer of a recipe for the trainable variables of a built model.

    Keras' own for adam and adamw. Assign ``learning_rate`` before each step, and for rmsprop_to_sgd ``sgd_share``
    (:func:`hpctrain.common.optim.learning_rate.sgd_share`) too. The optimizer clips gradients as the recipe says.
    """
    kinds = parameter_kinds(model)
    rate, epsilon, (beta1, beta2) = settings.learning_rate, settings.divisor_epsilon, settings.betas
    match settings.name:
        case "adam":
            return keras.optimizers.Adam(rate, beta1, beta2, epsilon, global_clipnorm=settings.clip_norm)
        case "adamw":
            optimizer = keras.optimizers.AdamW(
                rate, settings.weight_decay, beta1, beta2, epsilon, global_clipnorm=settings.clip_norm
            )
            pairs = zip(model.trainable_variables, kinds, strict=True)
            optimizer.exclude_from_weight_decay([v for v, kind in pairs if not rules.decay(settings, kind)])
            return optimizer
        case _:
            return KerasRuleOptimizer(settings, kinds)


def parameter_kinds(model: keras.Model) -> list[ParameterKind]:
    """The kind of each of a built model's ``trainable_variables`` in the layer that owns it.

    ``norm`` is all that Keras' normalisations, and classes derived from them, own, ``shortcut_norm`` where the layer's
    name has a part ``downsample``; ``bias`` is another layer's ``bias``.
    """
    kinds: dict[int, ParameterKind] = {}
    for layer in model._flatten_layers():
        if isinstance(layer, _NORMALISATIONS):
            kind: ParameterKind = "shortcut_norm" if "downsample" in layer.name.split(".") else "norm"
            kinds |= {id(variable): kind for variable in layer.trainable_variables}
        elif isinstance(getattr(layer, "bias", None), keras.Variable):
            kinds[id(layer.bias)] = "bias"
    return [kinds.get(id(variable), "weight") for variable in model.trainable_variables]


class KerasRuleOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """A Keras optimizer with an update rule of :mod:`hpctrain.common.optim.rules`.

    Args:
        settings: any optimizer but adam and adamw.
        kinds: one for each optimized variable.
    """

    def __init__(self, settings: Optimizer, kinds: list[ParameterKind]) -> None:
        super().__init__(learning_rate=settings.learning_rate, global_clipnorm=settings.clip_norm)
        self._settings, self._kinds = settings, kinds
        if self._settings.transition:
            self.sgd_share = self.add_variable((), initializer="ones", name="sgd_share")

    def build(self, variables: list[Any]) -> None:
        """Create the state of each variable."""
        if self.built:
            return
        super().build(variables)
        self._rules = [Rule(settings=self._settings, kind=kind, ops=_OPERATIONS) for kind in self._kinds]
        self._states = [
            {name: self._slot(variable, name) for name in self._settings.rule.slots(self._settings)}
            for variable in variables
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable."""
        index, dtype = self._get_variable_index(variable), variable.dtype
        state = self._states[index]
        share = ops.cast(self.sgd_share, dtype) if self._settings.transition else 1.0
        step = UpdateStep(rate=ops.cast(learning_rate, dtype), sgd_share=share)
        values = {name: ops.convert_to_tensor(slot) for name, slot in state.items()}
        weights, gradient = ops.convert_to_tensor(variable), ops.cast(ops.convert_to_tensor(gradient), dtype)
        change, new = self._rules[index].update(step, weights, gradient, values)
        self.assign_sub(variable, change)
        for name, value in new.items():
            self.assign(state[name], value)

    def _slot(self, variable: Any, name: str) -> Any:
        if name in SCALARS:
            return self.add_variable((), dtype=variable.dtype, name=name)
        return self.add_variable_from_reference(variable, name=name)

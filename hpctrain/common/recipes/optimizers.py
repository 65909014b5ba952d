"""The optimizers of recipes, one entry each: all that other modules know of one beside its formula.

The formulas are in :mod:`hpctrain.common.optim.rules`, and PyTorch's kernels for them in
:mod:`hpctrain.worker.train.torch_updates`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from hpctrain.common.recipes.sections import Optimizer

OptimizerName = Literal["sgd", "adam", "adamw", "lars", "lamb", "rmsprop_to_sgd"]

SCALARS = frozenset({"previous_rate", "updates"})
"""These states are numbers; all others are arrays of the parameter's shape."""


def _velocity(settings: Optimizer) -> tuple[str, ...]:
    if not settings.momentum:
        return ()
    return ("momentum", "previous_rate") if settings.momentum_correction else ("momentum",)


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """What is known of an optimizer.

    Attributes:
        keys: of a recipe's ``optimizer``, those that some optimizers lack.
        slots: the names of a parameter's state; all values are zero at first.
        epsilon: the default: PyTorch's for adam and adamw, as Keras's differs.
        adapts: whether it adapts the size of its steps, so that rates follow the root of the batch.
        averages: whether it averages gradients by the first of ``betas``, in place of ``momentum``.
        example: keys beside name and rate that a script's optimizer is taken to have.
        temporary: how many arrays an update that is not PyTorch's own holds at most for the parameters that it updates
            together, as MemTracker counts them.
    """

    keys: str
    slots: Callable[[Optimizer], tuple[str, ...]] = _velocity
    epsilon: float = 1e-8
    adapts: bool = False
    averages: bool = False
    example: Mapping[str, Any] = field(default_factory=dict)
    temporary: Callable[[Optimizer], int] = lambda settings: 1

    def state_elements(self, settings: Optimizer) -> int:
        """Elements of the optimizer's state for each element of a parameter."""
        return sum(slot not in SCALARS for slot in self.slots(settings))


_ADAM = UpdateRule(
    keys="betas epsilon",
    slots=lambda settings: ("mean", "square"),
    adapts=True,
    averages=True,
)
UPDATE_RULES: Mapping[OptimizerName, UpdateRule] = {
    "sgd": UpdateRule(
        keys="momentum nesterov decoupled_decay rate_in_momentum momentum_correction",
        example={"momentum": 0.9},
        # What Nesterov's momentum adds is not multiplied by the kernels.
        temporary=lambda settings: int(settings.rate_in_momentum and settings.nesterov),
    ),
    "adam": _ADAM,
    "adamw": _ADAM,
    "lars": UpdateRule(
        keys="momentum nesterov rate_in_momentum epsilon trust_coefficient trust_denominator trust_decay trust_clip "
        "unadapted",
        epsilon=0.0,
        adapts=True,
        example={"momentum": 0.9},
    ),
    "lamb": UpdateRule(
        keys="betas bias_correction epsilon unadapted",
        slots=lambda settings: ("mean", "square", "updates"),
        epsilon=1e-6,
        adapts=True,
        averages=True,
    ),
    "rmsprop_to_sgd": UpdateRule(
        keys="momentum epsilon transition",
        slots=lambda settings: ("square", *_velocity(settings)),
        example={"momentum": 0.9, "transition": {"center": 10.0, "period": 5.0, "rmsprop_rate": 1.0}},
        temporary=lambda settings: 2 if settings.weight_decay else 1,
    ),
}

"""The optimizers of recipes: their keys, and one entry for each with all that other modules know of it.

The formulas are in :mod:`hpctrain.common.optim.rules`. A new optimizer is an entry here and a formula there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from hpctrain.common.files.checked_yaml import Section
from hpctrain.common.recipes.keys import CheckedSection, Fraction, NotNegative, Of, Positive

OptimizerName = Literal["sgd", "adam", "adamw", "lars", "lamb", "rmsprop_to_sgd"]
# Parameters by what they are to their layer: gamma and beta of any normalisation, the same without those on a residual
# network's projected shortcuts, and any other layer's bias.
Kind = Literal["norm", "main_path_norm", "bias"]

SCALARS = frozenset({"updates"})
"""These states are numbers; all others are arrays of the parameter's shape."""

_MOMENTUM = Of("name", "sgd lars rmsprop_to_sgd")
_LARS = Of("name", "lars")
_BETAS = Of("name", "adam adamw lamb")


class Transition(Section):
    """The transition from RMSprop to SGD (Akiba et al. 2017, arXiv 1711.04325, section 3)."""

    center: Positive = Field(description="epoch at which SGD's part is one half")
    period: Positive = Field(description="half of it after the center, SGD's part is 1")
    rmsprop_rate: Positive = Field(description="RMSprop's part in units of SGD's rate")
    square_decay: Fraction = Field(0.99, description="share of the running mean of squared gradients that is kept")


class Optimizer(CheckedSection):
    """The update rule. The formulas are in hpctrain.common.optim.rules."""

    name: OptimizerName = Field(description="the update rule")
    learning_rate: Positive = Field(description="at schedule.base_batch samples a step, where that is given")
    momentum: Annotated[Fraction, _MOMENTUM] = Field(0.0, description="share of the velocity that is kept")
    nesterov: Annotated[bool, Of("name", "sgd lars")] = Field(
        False, description="Nesterov's momentum, as torch.optim.SGD defines it"
    )
    weight_decay: NotNegative = Field(0.0, description="factor of the parameters in the update")
    undecayed: tuple[Kind, ...] = Field((), description="parameters that are not decayed")
    rate_in_momentum: Annotated[bool, Of("name", "sgd lars")] = Field(
        False, description="v = m v + rate g, w -= v, instead of v = m v + g, w -= rate v"
    )
    betas: Annotated[tuple[Fraction, Fraction], _BETAS] = Field(
        (0.9, 0.999), description="shares of the running means of gradients and of their squares that are kept"
    )
    bias_correction: Annotated[bool, Of("name", "lamb")] = Field(
        True, description="the running means are divided by 1 - beta^t"
    )
    epsilon: Annotated[NotNegative | None, Of("name", "adam adamw lars lamb rmsprop_to_sgd")] = Field(
        None, description="by default 1e-8; lars 0, lamb 1e-6"
    )
    trust_coefficient: Annotated[Positive, _LARS] = Field(0.001, description="the paper's eta")
    trust_denominator: Annotated[Literal["sum_of_norms", "norm_of_sum"], _LARS] = Field(
        "sum_of_norms", description="|g| + decay |w| (the paper, MLPerf), or |g + decay w| (optax)"
    )
    trust_decay: Annotated[NotNegative | None, _LARS] = Field(
        None, description="the decay in the trust ratio's denominator; by default weight_decay"
    )
    unadapted: Annotated[tuple[Kind, ...], Of("name", "lars lamb")] = Field(
        (), description="parameters whose trust ratio is 1"
    )
    transition: Annotated[Transition | None, Of("name", "rmsprop_to_sgd")] = None
    rates: dict[str, Positive] = Field(
        {},
        description="factors of the learning rate by patterns of names of parameters, or of modules that hold them; "
        "the first that matches counts (torch only)",
    )
    clip_norm: Positive | None = Field(None, description="gradients are scaled by min(1, this / their norm)")

    @property
    def rule(self) -> UpdateRule:
        """What is known of the update rule."""
        return UPDATE_RULES[self.name]

    @property
    def divisor_epsilon(self) -> float:
        """The recipe's epsilon, or the optimizer's default."""
        return self.rule.epsilon if self.epsilon is None else self.epsilon

    def faults(self) -> Iterator[str]:
        if self.nesterov and not self.momentum:
            yield "nesterov needs momentum above 0"
        if self.trust_decay is not None and self.trust_denominator != "sum_of_norms":
            yield "trust_decay is for trust_denominator: sum_of_norms"
        if self.name == "adam" and self.weight_decay:
            yield "weight_decay does not belong to adam: frameworks disagree on its meaning; adamw has one"
        if self.name == "rmsprop_to_sgd" and self.transition is None:
            yield "rmsprop_to_sgd needs transition, and only it has one"


def _velocity(settings: Optimizer) -> tuple[str, ...]:
    return ("momentum",) if settings.momentum else ()


def _of_momentum(settings: Optimizer) -> int:
    return 2 + bool(settings.momentum) + settings.nesterov


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """What is known of an optimizer beside its keys and its formula.

    Attributes:
        slots: the names of a parameter's state; all values are zero at first.
        epsilon: the default: PyTorch's for adam and adamw, as Keras's differs.
        adapts: whether it adapts the size of its steps, so that rates follow the root of the batch.
        averages: whether it averages gradients by the first of ``betas``, in place of ``momentum``.
        example: keys beside name and rate that a script's optimizer is taken to have.
        temporary: how many arrays an update that is not PyTorch's own holds at most for the parameters that it updates
            together, as MemTracker counts them.
    """

    slots: Callable[[Optimizer], tuple[str, ...]] = _velocity
    epsilon: float = 1e-8
    adapts: bool = False
    averages: bool = False
    example: Mapping[str, Any] = field(default_factory=dict)
    temporary: Callable[[Optimizer], int] = lambda settings: 5

    def state_elements(self, settings: Optimizer) -> int:
        """Elements of the optimizer's state for each element of a parameter."""
        return sum(slot not in SCALARS for slot in self.slots(settings))


_ADAM = UpdateRule(slots=lambda settings: ("mean", "square"), adapts=True, averages=True)
UPDATE_RULES: Mapping[OptimizerName, UpdateRule] = {
    "sgd": UpdateRule(example={"momentum": 0.9}, temporary=_of_momentum),
    "adam": _ADAM,
    "adamw": _ADAM,
    "lars": UpdateRule(epsilon=0.0, adapts=True, example={"momentum": 0.9}, temporary=_of_momentum),
    "lamb": UpdateRule(slots=lambda settings: ("mean", "square", "updates"), epsilon=1e-6, adapts=True, averages=True),
    "rmsprop_to_sgd": UpdateRule(
        slots=lambda settings: ("square", *_velocity(settings)),
        example={"momentum": 0.9, "transition": {"center": 10.0, "period": 5.0, "rmsprop_rate": 1.0}},
    ),
}

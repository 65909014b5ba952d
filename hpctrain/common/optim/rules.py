"""The update rules of recipes, written once as pure functions of arrays.

w is the parameter, g its gradient, beta its decay, rate the step's learning rate, m the momentum. An array is one
parameter's in Keras; in PyTorch it is a list of tensors that operators work on together, and a norm, as any number of a
parameter, is a vector with an element for each of them. Intermediate arrays have no names that would keep them in
memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from hpctrain.common.recipes.optimizers import Kind, Optimizer, OptimizerName

# The norms of a residual network's projected shortcuts are a kind of their own: some sources decay those.
ParameterKind = Literal["weight", "bias", "norm", "shortcut_norm"]
# An array of a framework, or of NumPy.
Array = Any
State = dict[str, Array]

# How many numbers are updated together in PyTorch, by the kind of device: on a CPU they stay in its cache from one
# operation to the next, and a GPU has to keep intermediate ones.
TOGETHER = {"cpu": 1 << 19, "cuda": 1 << 22}
# The kinds of parameters that each name in a recipe covers.
_MEMBERS: dict[Kind, frozenset[ParameterKind]] = {
    "norm": frozenset({"norm", "shortcut_norm"}),
    "main_path_norm": frozenset({"norm"}),
    "bias": frozenset({"bias"}),
}


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The framework's functions that the rules need besides array operators; they keep types.

    Attributes:
        norm: the Euclidean one of all elements of a parameter.
        where: condition, number, number, each of a parameter.
    """

    norm: Callable[[Array], Array]
    sqrt: Callable[[Array], Array]
    expm1: Callable[[Array], Array]
    where: Callable[..., Array]


@dataclass(frozen=True, kw_only=True)
class UpdateStep:
    """The values of one step that are the same for all parameters.

    Attributes:
        sgd_share: for rmsprop_to_sgd, SGD's part in the update.
    """

    rate: Any
    sgd_share: Any = 1.0


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A recipe's update for the parameters of one kind, of every optimizer but adam and adamw."""

    settings: Optimizer
    kind: ParameterKind
    ops: Operations

    @property
    def decay(self) -> float:
        """The weight decay of the kind."""
        return decay(self.settings, self.kind)

    def update(self, step: UpdateStep, w: Array, g: Array, state: State) -> tuple[Array, State]:
        """The change to subtract from ``w``, and the new state."""
        return FORMULAS[self.settings.name](self, step, w, g, state)

    def decayed(self, g: Array, w: Array) -> Array:
        """The gradient with the decay of the parameters in it."""
        return g + w * self.decay if self.decay else g

    def ratio(self, numerator: Array, denominator: Array, defined: Array) -> Array:
        """The quotient where it is defined, 1 elsewhere."""
        return self.ops.where(defined, numerator / self.ops.where(defined, denominator, 1.0), 1.0)

    @property
    def adapted(self) -> bool:
        """Whether lars and lamb use a trust ratio for the kind."""
        return not _among(self.kind, self.settings.unadapted)


def decay(settings: Optimizer, kind: ParameterKind) -> float:
    """The weight decay of a kind of parameter; 0 for kinds that are not decayed."""
    return 0.0 if _among(kind, settings.undecayed) else settings.weight_decay


def _among(kind: ParameterKind, named: Iterable[Kind]) -> bool:
    return any(kind in _MEMBERS[name] for name in named)


def sgd(rule: Rule, step: UpdateStep, w: Array, g: Array, state: State) -> tuple[Array, State]:
    """Stochastic gradient descent with momentum (Goyal et al. 2017, arXiv 1706.02677, section 3).

    With d = g + beta w:

    - v = m v + d, w -= rate v; with Nesterov's momentum w -= rate (d + m v): equation 9, and PyTorch's SGD.
    - rate_in_momentum: v = m v + rate d, w -= v; with Nesterov's momentum w -= rate d + m v: Keras' SGD. With the
      paper's momentum correction, equation 10, this is equation 9 again.
    """
    return _with_momentum(rule, step, rule.decayed(g, w), state)


def lars(rule: Rule, step: UpdateStep, w: Array, g: Array, state: State) -> tuple[Array, State]:
    """Layer-wise adaptive rate scaling (You et al. 2017, arXiv 1708.03888, algorithm 1).

    lambda = eta |w| / (|g| + beta |w| + epsilon), or with trust_denominator norm_of_sum
    eta |w| / (|g + beta w| + epsilon); then SGD's momentum with d = lambda (g + beta w), in the paper with
    rate_in_momentum: v = m v + rate lambda (g + beta w), w -= v. The ratio is 1 where a norm is 0, as in MLPerf's
    reference, and for the unadapted kinds; the paper states neither. Its epsilon is 0.
    """
    return _with_momentum(rule, step, _adapted(rule, w, g) if rule.adapted else rule.decayed(g, w), state)


def _adapted(rule: Rule, w: Array, g: Array) -> Array:
    settings, d = rule.settings, rule.decayed(g, w)
    w_norm = rule.ops.norm(w)
    if settings.trust_denominator == "norm_of_sum":
        d_norm = g_norm = rule.ops.norm(d)
    else:
        g_norm = rule.ops.norm(g)
        # Kinds that are not decayed have no decay in the ratio either.
        beta = rule.decay and (rule.decay if settings.trust_decay is None else settings.trust_decay)
        d_norm = g_norm + beta * w_norm
    numerator = settings.trust_coefficient * w_norm
    return d * rule.ratio(numerator, d_norm + settings.divisor_epsilon, (w_norm > 0) & (g_norm > 0))


def lamb(rule: Rule, step: UpdateStep, w: Array, g: Array, state: State) -> tuple[Array, State]:
    """Layer-wise adaptive moments for batch training (You et al. 2020, arXiv 1904.00962, algorithm 2).

    m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2, both divided by 1 - beta^t with bias_correction;
    r = m / (sqrt(v) + epsilon) + beta w; w -= rate (|w| / |r|) r. The ratio is 1 where a norm is 0 and for the
    unadapted kinds. The paper's phi is the identity.
    """
    beta1, beta2 = rule.settings.betas
    updates = state["updates"] + 1
    mean = state["mean"] * beta1 + g * (1 - beta1)
    square = state["square"] * beta2 + g * g * (1 - beta2)
    own, of_squares = 1.0, 1.0
    if rule.settings.bias_correction:
        own, of_squares = (_one_minus_power(rule, beta, updates) for beta in rule.settings.betas)
    epsilon = rule.settings.divisor_epsilon
    r = rule.decayed(mean / (rule.ops.sqrt(square / of_squares) + epsilon) / own, w)
    if rule.adapted:
        w_norm, r_norm = rule.ops.norm(w), rule.ops.norm(r)
        r = r * rule.ratio(w_norm, r_norm, (w_norm > 0) & (r_norm > 0))
    return r * step.rate, {"mean": mean, "square": square, "updates": updates}


def rmsprop_to_sgd(rule: Rule, step: UpdateStep, w: Array, g: Array, state: State) -> tuple[Array, State]:
    """RMSprop at first, SGD in the end (Akiba et al. 2017, arXiv 1711.04325, section 3).

    With d = g + beta w: s = rho s + (1 - rho) d^2, v = m v + (a + b / (sqrt(s) + epsilon)) d, w -= rate v, where a is
    SGD's share and b = (1 - a) rmsprop_rate, the paper's (1 - alpha_SGD) eta_RMSprop / eta_SGD.
    """
    transition = rule.settings.transition
    assert transition is not None
    d = rule.decayed(g, w)
    square = state["square"] * transition.square_decay + d * d * (1 - transition.square_decay)
    rate = (1 - step.sgd_share) * transition.rmsprop_rate
    change, new = _with_momentum(
        rule,
        step,
        d * step.sgd_share + d / (rule.ops.sqrt(square) + rule.settings.divisor_epsilon) * rate,
        state,
    )
    return change, {"square": square, **new}


FORMULAS: dict[OptimizerName, Callable[[Rule, UpdateStep, Array, Array, State], tuple[Array, State]]] = {
    "sgd": sgd,
    "lars": lars,
    "lamb": lamb,
    "rmsprop_to_sgd": rmsprop_to_sgd,
}
"""The rule of each optimizer that is not the frameworks' own, as adam and adamw are."""


def _with_momentum(rule: Rule, step: UpdateStep, d: Array, state: State) -> tuple[Array, State]:
    """The change by a direction, see :func:`sgd`."""
    settings, m = rule.settings, rule.settings.momentum
    if not m:
        return d * step.rate, {}
    if settings.rate_in_momentum:
        d = d * step.rate
    v = state["momentum"] * m + d
    change = d + v * m if settings.nesterov else v
    return (change if settings.rate_in_momentum else change * step.rate), {"momentum": v}


def _one_minus_power(rule: Rule, beta: float, exponent: Array) -> Array:
    """1 - beta^exponent, exact in float32 too, where 1 - 0.999 would have four digits."""
    return -rule.ops.expm1(exponent * math.log(beta)) if beta else 1.0

"""The update rules of recipes, written once for both frameworks as pure functions of one parameter's arrays.

w is the parameter, g its gradient, beta its decay, rate the step's learning rate, m the momentum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from hpctrain.common.recipes.optimizers import OptimizerName
from hpctrain.common.recipes.sections import Kind, Optimizer

# The norms of a residual network's projected shortcuts are a kind of their own: some sources decay those.
ParameterKind = Literal["weight", "bias", "norm", "shortcut_norm"]
# An array of a framework, or of NumPy.
Array = Any
State = dict[str, Array]

# How many numbers are updated together in PyTorch, by the kind of device. On a CPU they stay in its cache from one
# operation to the next.
TOGETHER = {"cpu": 1 << 19, "cuda": 1 << 24}
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
        norm: the Euclidean one of all elements.
        where: condition, array, array or number.
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

    @property
    def adapted(self) -> bool:
        """Whether lars and lamb use a trust ratio for the kind."""
        return adapted(self.settings, self.kind)

    def update(self, step: UpdateStep, w: Array, g: Array, state: State) -> tuple[Array, State]:
        """The change to subtract from ``w``, and the new state."""
        return _RULES[self.settings.name](self, step, w, g, state)


def decay(settings: Optimizer, kind: ParameterKind) -> float:
    """The weight decay of a kind of parameter; 0 for kinds that are not decayed."""
    return 0.0 if _among(kind, settings.undecayed) else settings.weight_decay


def adapted(settings: Optimizer, kind: ParameterKind) -> bool:
    """Whether lars and lamb use a trust ratio for a kind of parameter."""
    return not _among(kind, settings.unadapted)


def trust_decay(settings: Optimizer, kind: ParameterKind) -> float:
    """Beta in the denominator of lars' trust ratio, 0 for kinds that are not decayed."""
    own, other = decay(settings, kind), settings.trust_decay
    return own if other is None or not own else other


def _among(kind: ParameterKind, named: Iterable[Kind]) -> bool:
    return any(kind in _MEMBERS[name] for name in named)


def epsilon(settings: Optimizer) -> float:
    """The recipe's epsilon, or the optimizer's default."""
    return settings.rule.epsilon if settings.epsilon is None else settings.epsilon


def sgd(rule: Rule, step: UpdateStep, w: Array, g: Array, state: State) -> tuple[Array, State]:
    """Stochastic gradient descent with momentum (Goyal et al. 2017, arXiv 1706.02677, section 3).

    With d = g + beta w (d = g where the decay is decoupled, which subtracts rate beta w as well):

    - v = m v + d, w -= rate v; with Nesterov's momentum w -= rate (d + m v): equation 9, and PyTorch's SGD.
    - rate_in_momentum: v = m v + rate d, w -= v; with Nesterov's momentum w -= rate d + m v: Keras' SGD.
    - momentum_correction: v = m (rate / previous rate) v + rate d, equation 10, which is equation 9 again as long as
      no rate is 0; a rate of 0 forgets the momentum.
    """
    decoupled = rule.settings.decoupled_decay
    change, new = _with_momentum(rule, step, g if decoupled else g + rule.decay * w, state)
    return (change + step.rate * rule.decay * w if decoupled else change), new


def lars(rule: Rule, step: UpdateStep, w: Array, g: Array, state: State) -> tuple[Array, State]:
    """Layer-wise adaptive rate scaling (You et al. 2017, arXiv 1708.03888, algorithm 1).

    lambda = eta |w| / (|g| + beta |w| + epsilon), or with trust_denominator norm_of_sum
    eta |w| / (|g + beta w| + epsilon); then SGD's momentum with d = lambda (g + beta w), in the paper with
    rate_in_momentum: v = m v + rate lambda (g + beta w), w -= v. The ratio is 1 where a norm is 0, as in MLPerf's
    reference, and for the unadapted kinds; the paper states neither. Its epsilon is 0.

    With trust_clip the ratio is min(lambda / rate, 1): no layer's rate is above the global one. That is Apex's LARC,
    which leaves out the decay as well where a norm is 0.
    """
    d = g + rule.decay * w
    if rule.adapted:
        w_norm, g_norm = rule.ops.norm(w), rule.ops.norm(g)
        if rule.settings.trust_denominator == "norm_of_sum":
            d_norm = g_norm = rule.ops.norm(d)
        else:
            d_norm = g_norm + trust_decay(rule.settings, rule.kind) * w_norm
        numerator = rule.settings.trust_coefficient * w_norm
        denominator, defined = d_norm + epsilon(rule.settings), (w_norm > 0) & (g_norm > 0)
        if rule.settings.trust_clip:
            denominator = denominator * step.rate
            # Where the quotient would be above 1, or the rate is 0, it is 1.
            defined = defined & (numerator < denominator)
        d = _ratio(rule, numerator, denominator, defined) * d
    return _with_momentum(rule, step, d, state)


def lamb(rule: Rule, step: UpdateStep, w: Array, g: Array, state: State) -> tuple[Array, State]:
    """Layer-wise adaptive moments for batch training (You et al. 2020, arXiv 1904.00962, algorithm 2).

    m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2, both divided by 1 - beta^t with bias_correction;
    r = m / (sqrt(v) + epsilon) + beta w; w -= rate (|w| / |r|) r. The ratio is 1 where a norm is 0 and for the
    unadapted kinds. The paper's phi is the identity.
    """
    beta1, beta2 = rule.settings.betas
    updates = state["updates"] + 1
    mean = beta1 * state["mean"] + (1 - beta1) * g
    square = beta2 * state["square"] + (1 - beta2) * g * g
    own, of_squares = 1.0, 1.0
    if rule.settings.bias_correction:
        own, of_squares = (_one_minus_power(rule, beta, updates) for beta in rule.settings.betas)
    r = mean / own / (rule.ops.sqrt(square / of_squares) + epsilon(rule.settings)) + rule.decay * w
    if rule.adapted:
        w_norm, r_norm = rule.ops.norm(w), rule.ops.norm(r)
        r = _ratio(rule, w_norm, r_norm, (w_norm > 0) & (r_norm > 0)) * r
    return step.rate * r, {"mean": mean, "square": square, "updates": updates}


def rmsprop_to_sgd(rule: Rule, step: UpdateStep, w: Array, g: Array, state: State) -> tuple[Array, State]:
    """RMSprop at first, SGD in the end (Akiba et al. 2017, arXiv 1711.04325, section 3).

    With d = g + beta w: s = rho s + (1 - rho) d^2, v = m v + (a + b / (sqrt(s) + epsilon)) d, w -= rate v, where a is
    SGD's share and b = (1 - a) rmsprop_rate, the paper's (1 - alpha_SGD) eta_RMSprop / eta_SGD.
    """
    transition = rule.settings.transition
    assert transition is not None
    d = g + rule.decay * w
    square = transition.square_decay * state["square"] + (1 - transition.square_decay) * d * d
    rmsprop = (1 - step.sgd_share) * transition.rmsprop_rate / (rule.ops.sqrt(square) + epsilon(rule.settings))
    change, new = _with_momentum(rule, step, (step.sgd_share + rmsprop) * d, state)
    return change, {"square": square, **new}


_RULES: dict[OptimizerName, Callable[[Rule, UpdateStep, Array, Array, State], tuple[Array, State]]] = {
    "sgd": sgd,
    "lars": lars,
    "lamb": lamb,
    "rmsprop_to_sgd": rmsprop_to_sgd,
}


def _with_momentum(rule: Rule, step: UpdateStep, d: Array, state: State) -> tuple[Array, State]:
    """The change by a direction, see :func:`sgd`."""
    settings, m = rule.settings, rule.settings.momentum
    if not m:
        return step.rate * d, {}
    own = step.rate * d if settings.rate_in_momentum else d
    new = {}
    kept = m * state["momentum"]
    if settings.momentum_correction:
        previous = state["previous_rate"]
        kept = _ratio(rule, step.rate, previous, previous > 0) * kept
        new["previous_rate"] = step.rate
    v = new["momentum"] = kept + own
    direction = own + m * v if settings.nesterov else v
    return (direction if settings.rate_in_momentum else step.rate * direction), new


def _ratio(rule: Rule, numerator: Array, denominator: Array, defined: Array) -> Array:
    """The quotient where it is defined, 1 elsewhere."""
    return rule.ops.where(defined, numerator / rule.ops.where(defined, denominator, 1.0), 1.0)


def _one_minus_power(rule: Rule, beta: float, exponent: Array) -> Array:
    """1 - beta^exponent, exact in float32 too, where 1 - 0.999 would have four digits."""
    return -rule.ops.expm1(exponent * math.log(beta)) if beta else 1.0

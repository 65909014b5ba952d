"""The update rules of recipes in PyTorch, for many parameters at once.

The rules are those of :mod:`hpctrain.common.optim.rules`, which has their formulas. Here each operation takes a list of
tensors, and what is SGD's or Adam's part of a rule is done by PyTorch's fused kernels. No operation waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from hpctrain.common.optim import rules
from hpctrain.common.optim.rules import ParameterKind
from hpctrain.common.recipes.sections import Optimizer
from hpctrain.worker.adapters.torch.pieces import is_dtensor, local_tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tensors = list[torch.Tensor]
State = dict[str, torch.Tensor]

# PyTorch's fused kernels, which read and write each number once, are there for these. Those of a CPU compute wrong
# numbers in 16 bits (PyTorch 2.13, SGD with 16 elements or more).
_FUSED = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32, torch.float64, torch.float16, torch.bfloat16)}


def takes_fused(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether PyTorch's optimizers have fused kernels for the parameters, with right numbers."""
    return all(each.dtype in _FUSED.get(each.device.type, ()) for each in parameters)


class TorchRuleOptimizer(torch.optim.Optimizer):
    """A PyTorch optimizer with an update rule of :mod:`hpctrain.common.optim.rules`.

    Args:
        groups: groups of parameters, each with its ``kind``.
        settings: any optimizer but adam and adamw.
    """

    def __init__(self, groups: list[dict[str, Any]], settings: Optimizer) -> None:
        defaults: dict[str, Any] = {"lr": settings.learning_rate}
        if settings.transition:
            defaults["sgd_share"] = 1.0
        super().__init__(groups, defaults)
        self._settings = settings

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in _together(each for each in group["params"] if each.grad is not None):
                states = [self._begun(each) for each in parameters]
                _Update(self._settings, group, parameters, states).apply()
        return loss

    def _begun(self, parameter: torch.Tensor) -> State:
        """A parameter's state, with what was missing in it."""
        state: State = self.state[parameter]
        for name in rules.slots(self._settings):
            if name not in state:
                state[name] = _number(parameter, name) if name in rules.SCALARS else torch.zeros_like(parameter)
        return state


class _Update:
    """One update of some parameters of a group: on one device, of one type, and divided over the same ranks."""

    def __init__(
        self, settings: Optimizer, group: dict[str, Any], parameters: Tensors, states: Sequence[State]
    ) -> None:
        self._settings, self._states = settings, states
        self._rate, self._sgd_share = group["lr"], group.get("sgd_share", 1.0)
        self._kind: ParameterKind = group["kind"]
        self._decay = rules.decay(settings, self._kind)
        self._ranks = _ranks(parameters[0])
        # This rank's parts.
        self._w = [local_tensor(each) for each in parameters]
        self._g = [_gradient(each) for each in parameters]
        self._fused = takes_fused(self._w)
        # Lamb's direction.
        self._r: Tensors = []

    def apply(self) -> None:
        ratio = None
        if self._settings.name == "lamb":
            self._find_direction()
        if self._settings.name in ("lars", "lamb") and rules.adapted(self._settings, self._kind):
            ratio = self._ratio()
        match self._settings.name:
            case "lamb" if ratio is None:
                torch._foreach_sub_(self._w, self._r, alpha=self._rate)
            case "lamb":
                torch._foreach_mul_(self._r, (self._rate * ratio).unbind())
                torch._foreach_sub_(self._w, self._r)
            case "rmsprop_to_sgd":
                self._descend(self._rmsprop())
            case "sgd" if self._settings.decoupled_decay and self._decay:
                torch._foreach_mul_(self._w, 1 - self._rate * self._decay)
                self._descend(self._g)
            case _:
                self._descend(self._decayed(), ratio)

    def _ratio(self) -> torch.Tensor:
        """The trust ratio of each parameter."""
        settings = self._settings
        w_norm, other = self._norms()
        defined = (w_norm > 0) & (other > 0)
        if settings.name == "lamb":
            return _quotient(w_norm, other, defined)
        if settings.trust_denominator == "sum_of_norms":
            other = other + rules.trust_decay(settings, self._kind) * w_norm
        numerator, denominator = settings.trust_coefficient * w_norm, other + rules.epsilon(settings)
        if settings.trust_clip:
            denominator = denominator * self._rate
            defined = defined & (numerator < denominator)
        return _quotient(numerator, denominator, defined)

    def _norms(self) -> torch.Tensor:
        """The norms of the whole parameters, and of what the trust ratio compares them with."""
        other = self._g
        if self._settings.name == "lamb":
            other = self._r
        elif self._settings.trust_denominator == "norm_of_sum":
            other = self._decayed()
        wide = torch.float32 if self._w[0].itemsize < 4 else None
        norms = torch.stack(torch._foreach_norm([*self._w, *other], 2, wide)).view(2, -1)
        if not self._ranks:
            return norms
        squares = norms.square()
        for group in self._ranks:
            torch.distributed.all_reduce(squares, group=group)
        return squares.sqrt()

    def _find_direction(self) -> None:
        """Update lamb's moments, and find its direction."""
        settings, updates = self._settings, self._slot("updates")
        if settings.bias_correction:
            # Counted in float32.
            counted = [each.to(torch.float32, copy=True) for each in updates]
        else:
            # After infinitely many updates there is nothing to correct.
            counted = [torch.full_like(each, math.inf, dtype=torch.float32) for each in updates]
        torch._foreach_add_(updates, 1)
        # Adam's update of the decay alone, with the sign turned.
        self._r = list(torch._foreach_mul(self._w, self._decay))
        moments = self._slot("mean"), self._slot("square")
        (beta1, beta2), epsilon = settings.betas, rules.epsilon(settings)
        named: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "eps": epsilon, "amsgrad": False, "maximize": False}
        if self._fused:
            torch._foreach_add_(counted, 1)
            torch._fused_adam_(self._r, self._g, *moments, [], counted, lr=-1.0, weight_decay=0.0, **named)
        else:
            adam(self._r, self._g, *moments, [], counted, foreach=False, lr=-1.0, weight_decay=0.0, **named)

    def _rmsprop(self) -> Tensors:
        """The direction of rmsprop_to_sgd."""
        transition, direction, square = self._settings.transition, self._decayed(), self._slot("square")
        assert transition is not None
        torch._foreach_mul_(square, transition.square_decay)
        torch._foreach_addcmul_(square, direction, direction, 1 - transition.square_decay)
        root = torch._foreach_sqrt(square)
        torch._foreach_add_(root, rules.epsilon(self._settings))
        own = list(torch._foreach_mul(direction, self._sgd_share))
        torch._foreach_addcdiv_(own, direction, root, (1 - self._sgd_share) * transition.rmsprop_rate)
        return own

    def _descend(self, direction: Tensors, ratio: torch.Tensor | None = None) -> None:
        """SGD's update by a direction times a ratio for each parameter, see :func:`hpctrain.common.optim.rules.sgd`."""
        settings, rate, m = self._settings, self._rate, self._settings.momentum
        inside = bool(m) and settings.rate_in_momentum
        factor: Any = rate if inside else None
        if ratio is not None:
            factor = (ratio * rate if inside else ratio).unbind()
        if factor is not None and direction is self._g:
            # Gradients stay as they are.
            direction = list(torch._foreach_mul(direction, factor))
        elif factor is not None:
            torch._foreach_mul_(direction, factor)
        if not m:
            torch._foreach_sub_(self._w, direction, alpha=rate)
            return
        rate, velocity, nesterov = 1.0 if inside else rate, self._slot("momentum"), settings.nesterov
        if settings.momentum_correction:
            self._correct(velocity)
        named: dict[str, Any] = {"weight_decay": 0.0, "momentum": m, "dampening": 0.0, "maximize": False}
        if self._fused:
            torch._fused_sgd_(self._w, direction, velocity, lr=rate, nesterov=nesterov, is_first_step=False, **named)
        else:
            sgd(self._w, direction, velocity, foreach=False, lr=rate, nesterov=nesterov, **named)  # type: ignore[arg-type]

    def _correct(self, velocity: Tensors) -> None:
        """Scale the momentum by the rate over the rate of the step before (Goyal et al. 2017, equation 10)."""
        # On the CPU, so that no GPU is waited for, except after loading.
        previous = torch.stack([each.cpu() for each in self._slot("previous_rate")])
        now = torch.full_like(previous, self._rate)
        torch._foreach_mul_(velocity, _quotient(now, previous, previous > 0).unbind())
        for state, rate in zip(self._states, now.unbind(), strict=True):
            state["previous_rate"] = rate

    def _slot(self, name: str) -> Tensors:
        """What the states have by a name, laid out as the parameters are."""
        for state, w in zip(self._states, self._w, strict=True):
            if name not in rules.SCALARS and not is_dtensor(state[name]):
                # A state that was loaded may be laid out as the parameter was when it was saved.
                state[name] = _laid_out(state[name], w)
        return [local_tensor(each[name]) for each in self._states]

    def _decayed(self) -> Tensors:
        """The gradients with the decay added."""
        return list(torch._foreach_add(self._g, self._w, alpha=self._decay)) if self._decay else self._g


def _together(parameters: Iterable[torch.Tensor]) -> Iterator[Tensors]:
    """Parameters in lists of which each has one device, one type and one division over ranks."""
    together: Tensors = []
    before, numbers = None, 0
    for each in parameters:
        device, ranks = each.device, _ranks(each)
        # Norms of divided parameters are messages, of which there should be few.
        most = rules.TOGETHER["cpu" if device.type == "cpu" and not ranks else "cuda"]
        if together and (before != (device, each.dtype, ranks) or numbers + each.numel() > most):
            yield together
            together, numbers = [], 0
        together.append(each)
        before, numbers = (device, each.dtype, ranks), numbers + each.numel()
    if together:
        yield together


def _ranks(parameter: torch.Tensor) -> list[ProcessGroup]:
    """The groups of ranks over which a parameter's elements are divided."""
    if not is_dtensor(parameter):
        return []
    mesh = parameter.device_mesh
    return [
        mesh.get_group(axis)
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    ]


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter's gradient, laid out as the parameter is: the kernels need that."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    if is_dtensor(parameter) and is_dtensor(gradient) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return _laid_out(local_tensor(gradient), local_tensor(parameter))


def _laid_out(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor with its numbers in another's order in memory, which fused kernels need; a copy where it had not."""
    return tensor if tensor.stride() == like.stride() else torch.empty_like(like).copy_(tensor)


def _number(parameter: torch.Tensor, name: str) -> torch.Tensor:
    """A number of a parameter's state at its beginning."""
    # Rates are known to the host, counts belong to the kernels.
    device = "cpu" if name == "previous_rate" else parameter.device
    return torch.zeros((), dtype=parameter.dtype, device=device)


def _quotient(numerator: torch.Tensor, denominator: torch.Tensor, defined: torch.Tensor) -> torch.Tensor:
    """The quotient where it is defined, 1 elsewhere."""
    return torch.where(defined, numerator / torch.where(defined, denominator, 1.0), 1.0)

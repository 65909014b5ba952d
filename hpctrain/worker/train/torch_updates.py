"""The update rules of recipes in PyTorch, for many parameters at once.

The rules are those of :mod:`hpctrain.common.optim.rules`, which has their formulas. Here each operation takes a list of
tensors, and what is SGD's or Adam's part of a rule is done by PyTorch's fused kernels. No operation waits for a device.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from hpctrain.common.optim import rules
from hpctrain.common.optim.rules import ParameterKind
from hpctrain.common.recipes.sections import Optimizer
from hpctrain.worker.adapters.torch.pieces import is_dtensor, laid_out, local_tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tensors = list[torch.Tensor]
State = dict[str, torch.Tensor]

# PyTorch's fused kernels, which read and write each number once, are there for these. Those of a CPU compute wrong
# numbers in 16 bits (PyTorch 2.13, SGD with 16 elements or more).
_FUSED = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32, torch.float64, torch.float16, torch.bfloat16)}


def takes_fused(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether PyTorch's optimizers have fused kernels for the parameters, with right numbers."""
    return all(each.dtype in _FUSED.get(each.device.type, ()) and _without_gaps(each) for each in parameters)


def _without_gaps(tensor: torch.Tensor) -> bool:
    """Whether memory has a tensor's numbers next to each other: the kernels would write what lies between them."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


# Tensors that no mode of PyTorch's has made, such as one without memory.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Each thread's memory for products, and for how many at most.
_kept = threading.local()
_MOST_KEPT = 1 << 22


class TorchRuleOptimizer(torch.optim.Optimizer):
    """A PyTorch optimizer with an update rule of :mod:`hpctrain.common.optim.rules`.

    Args:
        groups: groups of parameters, each with its ``kind``.
        settings: any optimizer but adam and adamw.
        masked: all parameters have fused kernels. A step then changes nothing where the attribute ``found_inf``, a
            tensor as a GradScaler sets it, is 1; but for the rules whose numbers the host keeps or NaN would spoil.
    """

    def __init__(self, groups: list[dict[str, Any]], settings: Optimizer, *, masked: bool = False) -> None:
        defaults: dict[str, Any] = {"lr": settings.learning_rate}
        if settings.transition:
            defaults["sgd_share"] = 1.0
        super().__init__(groups, defaults)
        self._settings = settings
        self._step_supports_amp_scaling = masked and not settings.momentum_correction and settings.transition is None

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
        self._update(
            [
                (group, parameters, [self._begun(each) for each in parameters])
                for group in self.param_groups
                for parameters in _together(each for each in group["params"] if each.grad is not None)
            ]
        )
        return loss

    def _update(self, lists: Sequence[tuple[dict[str, Any], Tensors, list[State]]]) -> None:
        """Update lists of parameters, large ones on a CPU in PyTorch's number of threads, each with lists of its own.

        PyTorch would divide each operation over its threads, and each would wait for the slowest in every one of them.
        """
        settings, fault = self._settings, getattr(self, "found_inf", None)

        def update(one: tuple[dict[str, Any], Tensors, list[State]]) -> None:
            _Update(settings, *one, fault).apply()

        parameters = [each for _, some, _ in lists for each in some]
        threads = min(torch.get_num_threads(), len(lists), len(os.sched_getaffinity(0)))
        large = sum(each.numel() for each in parameters) > rules.TOGETHER["cpu"]
        # Neither ranks, whose messages have an order, nor GPUs have a part in it.
        if threads > 1 and large and all(each.is_cpu and not _ranks(each) for each in parameters):
            deque(_threads(threads).map(update, lists), maxlen=0)
        else:
            deque(map(update, lists), maxlen=0)

    def _begun(self, parameter: torch.Tensor) -> State:
        """A parameter's state, with what was missing in it."""
        state: State = self.state[parameter]
        for name in rules.slots(self._settings):
            if name not in state:
                state[name] = _number(parameter, name) if name in rules.SCALARS else torch.zeros_like(parameter)
        return state


class _Update:
    """One update of some parameters of a group: on one device, of one type, and divided over the same ranks.

    Args:
        fault: on that device, 1 where nothing is to change, else 0.
    """

    def __init__(
        self,
        settings: Optimizer,
        group: dict[str, Any],
        parameters: Tensors,
        states: Sequence[State],
        fault: torch.Tensor | None,
    ) -> None:
        self._settings, self._states, self._fault = settings, states, fault
        self._rate, self._sgd_share = group["lr"], group.get("sgd_share", 1.0)
        self._kind: ParameterKind = group["kind"]
        self._decay = rules.decay(settings, self._kind)
        self._ranks = _ranks(parameters[0])
        # This rank's parts.
        self._w = [local_tensor(each) for each in parameters]
        self._g = [_gradient(each) for each in parameters]
        self._fused = takes_fused(self._w)

    @torch.no_grad()
    def apply(self) -> None:
        settings = self._settings
        match settings.name:
            case "lamb":
                direction = self._adams_direction()
                self._subtract(direction, self._ratio(direction))
            case "lars" if settings.trust_denominator == "norm_of_sum":
                direction = self._decayed(self._g, self._decay)
                self._descend(direction, 0.0, self._ratio(direction))
            case "lars":
                self._descend(self._g, self._decay, self._ratio(self._g))
            case "rmsprop_to_sgd":
                self._descend(self._rmsprop(), 0.0)
            case "sgd" if settings.decoupled_decay and self._decay:
                torch._foreach_mul_(self._w, self._unless(1.0, 1 - self._rate * self._decay))
                self._descend(self._g, 0.0)
            case _:
                self._descend(self._g, self._decay)

    def _ratio(self, other: Tensors) -> torch.Tensor | None:
        """The trust ratio of each parameter, whose norm is compared with another's; None where all are 1."""
        settings = self._settings
        if not rules.adapted(settings, self._kind):
            return None
        w_norm, norm = self._norms(other)
        defined = (w_norm > 0) & (norm > 0)
        if settings.name == "lamb":
            return _quotient(w_norm, norm, defined)
        if settings.trust_denominator == "sum_of_norms":
            norm = norm + rules.trust_decay(settings, self._kind) * w_norm
        numerator, denominator = settings.trust_coefficient * w_norm, norm + rules.epsilon(settings)
        if settings.trust_clip:
            denominator = denominator * self._rate
            defined = defined & (numerator < denominator)
        return _quotient(numerator, denominator, defined)

    def _norms(self, other: Tensors) -> torch.Tensor:
        """The norms of the whole parameters, and of what the trust ratio compares them with."""
        wide = torch.float32 if self._w[0].itemsize < 4 else None
        norms = torch.stack(torch._foreach_norm([*self._w, *other], 2, wide)).view(2, -1)
        if not self._ranks:
            return norms
        squares = norms.square()
        for group in self._ranks:
            torch.distributed.all_reduce(squares, group=group)
        return squares.sqrt()

    def _adams_direction(self) -> Tensors:
        """Update lamb's moments, and find its direction."""
        settings, updates = self._settings, self._slot("updates")
        if settings.bias_correction:
            # Counted in float32.
            counted = [each.to(torch.float32, copy=True) for each in updates]
        else:
            # After infinitely many updates there is nothing to correct.
            counted = [torch.full_like(each, math.inf, dtype=torch.float32) for each in updates]
        torch._foreach_add_(updates, self._unless(0.0, 1.0))
        # Adam's update of the decay alone, with the sign turned.
        direction = _times(self._w, self._decay)
        moments = self._slot("mean"), self._slot("square")
        (beta1, beta2), epsilon = settings.betas, rules.epsilon(settings)
        named: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "eps": epsilon, "amsgrad": False, "maximize": False}
        if self._fused:
            torch._foreach_add_(counted, 1)
            named["found_inf"] = self._fault
            torch._fused_adam_(direction, self._g, *moments, [], counted, lr=-1.0, weight_decay=0.0, **named)
        else:
            adam(direction, self._g, *moments, [], counted, foreach=False, lr=-1.0, weight_decay=0.0, **named)
        return direction

    def _subtract(self, direction: Tensors, ratio: torch.Tensor | None) -> None:
        """Subtract a direction times the rate and a ratio for each parameter."""
        if ratio is None:
            if self._fault is not None:
                torch._foreach_mul_(direction, self._unless(0.0, 1.0))
            torch._foreach_sub_(self._w, direction, alpha=self._rate)
        elif self._fault is None and _is_readable(ratio):
            # Numbers that can be read without waiting save a pass.
            for w, each, factor in zip(self._w, direction, (self._rate * ratio).tolist(), strict=True):
                w.sub_(each, alpha=factor)
        else:
            torch._foreach_mul_(direction, self._unless(0.0, self._rate * ratio).unbind())
            torch._foreach_sub_(self._w, direction)

    def _rmsprop(self) -> Tensors:
        """The direction of rmsprop_to_sgd."""
        transition, direction, square = (
            self._settings.transition,
            self._decayed(self._g, self._decay),
            self._slot("square"),
        )
        assert transition is not None
        torch._foreach_mul_(square, transition.square_decay)
        torch._foreach_addcmul_(square, direction, direction, 1 - transition.square_decay)
        root = torch._foreach_sqrt(square)
        torch._foreach_add_(root, rules.epsilon(self._settings))
        own = list(torch._foreach_mul(direction, self._sgd_share))
        torch._foreach_addcdiv_(own, direction, root, (1 - self._sgd_share) * transition.rmsprop_rate)
        return own

    def _descend(self, direction: Tensors, decay: float, ratio: torch.Tensor | None = None) -> None:
        """SGD's update by a direction times a ratio for each parameter, see :func:`hpctrain.common.optim.rules.sgd`.

        Args:
            decay: of the parameters, added to the direction.
        """
        settings, m = self._settings, self._settings.momentum
        velocity = self._slot("momentum") if m else []
        if settings.momentum_correction:
            self._correct(velocity)
        # What the direction and what the change are multiplied by.
        own, rate = (self._rate, 1.0) if m and settings.rate_in_momentum else (1.0, self._rate)
        factors = [own] if ratio is None else (own * ratio).tolist() if _is_readable(ratio) else []
        if not factors or (settings.nesterov and factors != [1.0]):
            # Kernels neither take a device's numbers nor multiply what Nesterov's momentum adds.
            direction, decay = self._decayed(direction, decay), 0.0
            scale = own if ratio is None else (own * ratio).unbind()
            if direction is self._g:
                # Gradients stay as they are.
                direction = list(torch._foreach_mul(direction, scale))
            else:
                torch._foreach_mul_(direction, scale)
            factors = [1.0]
        each = len(self._w) if len(factors) == 1 else 1
        for number, factor in enumerate(factors):
            part = slice(number * each, (number + 1) * each)
            self._sgd(self._w[part], direction[part], velocity[part], decay, factor, rate)

    def _sgd(self, w: Tensors, direction: Tensors, velocity: Tensors, decay: float, factor: float, rate: float) -> None:
        """v = m v + factor (direction + decay w), w -= rate v."""
        settings = self._settings
        own = {"lr": rate, "dampening": 1 - factor} if velocity else {"lr": rate * factor, "dampening": 0.0}
        named: dict[str, Any] = {"weight_decay": decay, "momentum": settings.momentum, "maximize": False, **own}
        if self._fused:
            named["found_inf"] = self._fault
            torch._fused_sgd_(w, direction, velocity, nesterov=settings.nesterov, is_first_step=False, **named)
        else:
            sgd(w, direction, velocity, foreach=False, nesterov=settings.nesterov, **named)  # type: ignore[arg-type]

    @overload
    def _unless(self, fault: float, factor: float) -> Any: ...
    @overload
    def _unless(self, fault: float, factor: torch.Tensor) -> torch.Tensor: ...
    def _unless(self, fault: float, factor: Any) -> Any:
        """A factor, or another one where nothing is to change."""
        return factor if self._fault is None else torch.where(self._fault > 0, fault, factor)

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
                state[name] = laid_out(state[name], w)
        return [local_tensor(each[name]) for each in self._states]

    def _decayed(self, direction: Tensors, decay: float) -> Tensors:
        """A direction with the decay added."""
        return list(torch._foreach_add(direction, self._w, alpha=decay)) if decay else direction


@functools.cache
def _threads(number: int) -> ThreadPoolExecutor:
    """Threads in which PyTorch's operations are not divided."""
    begun, before = threading.Barrier(number + 1), torch.get_num_threads()

    def begin() -> None:
        # What a thread first asks for gives it as many as others have.
        torch.get_num_threads()
        torch.set_num_threads(1)
        begun.wait()

    pool = ThreadPoolExecutor(number, "hpctrain-update", begin)
    for _ in range(number):
        pool.submit(int)
    begun.wait()
    # Threads that begin later have as many as before.
    torch.set_num_threads(before)
    return pool


# A forked process has none of the threads.
os.register_at_fork(after_in_child=_threads.cache_clear)


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
    return laid_out(local_tensor(gradient), local_tensor(parameter))


def _times(tensors: Tensors, factor: float) -> Tensors:
    """Products, where they are few in memory that this thread's next products take: new pages take a CPU longer."""
    numbers = sum(each.numel() for each in tensors)
    plain = all(each.is_cpu and each.is_contiguous() and type(each) in _PLAIN for each in tensors)
    if not plain or numbers > _MOST_KEPT:
        return list(torch._foreach_mul(tensors, factor))
    bytes_ = numbers * tensors[0].itemsize
    memory: torch.Tensor | None = getattr(_kept, "memory", None)
    if memory is None or memory.nbytes < bytes_:
        memory = _kept.memory = torch.empty(bytes_, dtype=torch.uint8, device="cpu")
    parts = memory[:bytes_].view(tensors[0].dtype).split([each.numel() for each in tensors])
    products = [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]
    for each, product in zip(tensors, products, strict=True):
        torch.mul(each, factor, out=product)
    return products


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether its numbers can be read without waiting; what has none, as where memory is tracked, goes a GPU's way."""
    return tensor.is_cpu and type(tensor) in _PLAIN


def _number(parameter: torch.Tensor, name: str) -> torch.Tensor:
    """A number of a parameter's state at its beginning."""
    # Rates are known to the host, counts belong to the kernels.
    device = "cpu" if name == "previous_rate" else parameter.device
    return torch.zeros((), dtype=parameter.dtype, device=device)


def _quotient(numerator: torch.Tensor, denominator: torch.Tensor, defined: torch.Tensor) -> torch.Tensor:
    """The quotient where it is defined, 1 elsewhere."""
    return torch.where(defined, numerator / torch.where(defined, denominator, 1.0), 1.0)

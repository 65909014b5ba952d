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
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch._utils import _unflatten_dense_tensors
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from hpctrain.common.optim import rules
from hpctrain.common.optim.rules import ParameterKind
from hpctrain.common.recipes.optimizers import SCALARS
from hpctrain.common.recipes.sections import Optimizer
from hpctrain.worker.adapters.torch.tensor_pieces import is_dtensor, laid_out, local_tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tensors = list[torch.Tensor]
# One for each parameter, in an array where it can be read without waiting.
Ratio = torch.Tensor | NDArray[Any]
ArrayT = TypeVar("ArrayT", torch.Tensor, NDArray[Any])
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
# For how many numbers of sums and of products each thread keeps memory at most.
_MOST_KEPT = 1 << 22
_START_SECONDS = 60.0


class _Memory(threading.local):
    """Each thread's memory for sums and products."""

    def __init__(self) -> None:
        self.kept: dict[object, torch.Tensor] = {}


_memory = _Memory()


class TorchRuleOptimizer(torch.optim.Optimizer):
    """A PyTorch optimizer with an update rule of :mod:`hpctrain.common.optim.rules`.

    Args:
        groups: groups of parameters, each with its ``kind``.
        settings: any optimizer but adam and adamw.
        masked: all parameters have fused kernels. A step then changes nothing where the attribute ``found_inf``, a
            tensor as a GradScaler sets it, is 1; but for momentum correction, whose rates the host keeps.
    """

    def __init__(self, groups: list[dict[str, Any]], settings: Optimizer, *, masked: bool = False) -> None:
        defaults: dict[str, Any] = {"lr": settings.learning_rate}
        if settings.transition:
            defaults["sgd_share"] = 1.0
        super().__init__(groups, defaults)
        self._settings, self._names = settings, settings.rule.slots(settings)
        self._step_supports_amp_scaling = masked and not settings.momentum_correction

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

        threads = min(torch.get_num_threads(), len(lists), len(os.sched_getaffinity(0)))
        sizes = [sum(each.numel() for each in parameters) for _, parameters, _ in lists]
        # Neither ranks, whose messages have an order, nor GPUs have a part in it.
        alone = all(parameters[0].is_cpu and not _ranks(parameters[0]) for _, parameters, _ in lists)
        if threads > 1 and alone and sum(sizes) > rules.TOGETHER["cpu"]:
            # The largest first, so that no thread waits long for the last.
            order = sorted(range(len(lists)), key=sizes.__getitem__, reverse=True)
            deque(_threads(threads).map(update, [lists[number] for number in order]), maxlen=0)
        else:
            deque(map(update, lists), maxlen=0)

    def _begun(self, parameter: torch.Tensor) -> State:
        """A parameter's state, with what was missing in it."""
        state: State = self.state[parameter]
        for name in self._names:
            if name not in state:
                state[name] = _number(parameter, name) if name in SCALARS else torch.zeros_like(parameter)
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
        self._adapted = settings.name in ("lars", "lamb") and rules.adapted(settings, self._kind)
        self._ranks = _ranks(parameters[0])
        # This rank's parts.
        self._w = [local_tensor(each) for each in parameters]
        self._g = [_gradient(each) for each in parameters]
        self._slots = {name: self._slot(name) for name in settings.rule.slots(settings)}
        self._fused = takes_fused(self._w)
        # What depends on a fault stays on its device.
        self._readable = fault is None and all(map(_is_readable, self._w))

    @torch.no_grad()
    def apply(self) -> None:
        settings = self._settings
        match settings.name:
            case "lamb":
                torch._foreach_add_(self._slots["updates"], self._unless(0.0, 1.0))
                self._lamb()
            case "lars" if self._adapted and settings.trust_denominator == "norm_of_sum":
                norms, direction = self._norms(self._w), self._decayed(self._g, self._decay)
                self._descend(direction, 0.0, self._ratio(norms, direction))
            case "lars" if self._adapted:
                self._descend(self._g, self._decay, self._ratio(self._norms(self._w), self._g))
            case "rmsprop_to_sgd":
                self._descend(self._rmsprop(), 0.0)
            case "sgd" if settings.decoupled_decay:
                self._shrink()
                self._descend(self._g, 0.0)
            case _:
                self._descend(self._g, self._decay)

    def _shrink(self) -> None:
        """The decay that is decoupled from the direction."""
        if self._decay:
            torch._foreach_mul_(self._w, self._unless(1.0, 1 - self._rate * self._decay))

    def _norms(self, tensors: Tensors) -> Sequence[torch.Tensor]:
        """Those of this rank's parts."""
        return torch._foreach_norm(tensors, 2, torch.float32 if self._w[0].itemsize < 4 else None)

    def _ratio(self, norms: Sequence[torch.Tensor], other: Tensors) -> Ratio:
        """The trust ratio of each parameter, whose norm is compared with another's."""
        settings = self._settings
        whole = self._over_ranks(torch.stack([*norms, *self._norms(other)]).view(2, -1))
        # A CPU takes longer to begin an operation of PyTorch than one of NumPy.
        w_norm, norm = whole.numpy() if self._readable else whole
        defined, numerator, denominator = (w_norm > 0) & (norm > 0), w_norm, norm
        if settings.name == "lars":
            if settings.trust_denominator == "sum_of_norms":
                norm = norm + rules.trust_decay(settings, self._kind) * w_norm
            numerator, denominator = settings.trust_coefficient * w_norm, norm + rules.epsilon(settings)
            if settings.trust_clip:
                denominator = denominator * self._rate
                defined = defined & (numerator < denominator)
        ratio: Ratio = _quotient(numerator, denominator, defined)
        return ratio

    def _over_ranks(self, norms: torch.Tensor) -> torch.Tensor:
        """The norms of whole parameters from those of this rank's parts."""
        if not self._ranks:
            return norms
        squares = norms.square()
        for group in self._ranks:
            torch.distributed.all_reduce(squares, group=group)
        return squares.sqrt()

    def _lamb(self) -> None:
        counted, moments = _never(self._w), (self._slots["mean"], self._settings.betas)
        if self._settings.bias_correction:
            counted = [each.float() for each in self._slots["updates"]]
        if not self._adapted:
            self._shrink()
            self._adam(self._w, self._g, *moments, counted, self._rate)
            return
        # First, so that a CPU has the parameters in its cache for what follows.
        norms, direction = self._norms(self._w), self._times(self._w, self._decay)
        # An update of the decay alone, with the sign turned.
        self._adam(direction, self._g, *moments, counted, -1.0)
        self._subtract(direction, self._ratio(norms, direction))

    def _adam(
        self, w: Tensors, g: Tensors, mean: Tensors, betas: tuple[float, float], counted: Tensors, rate: float
    ) -> None:
        """Adam's update of any tensors.

        Args:
            counted: the number of updates in float32, with this one.
        """
        square, epsilon = self._slots["square"], rules.epsilon(self._settings)
        named: dict[str, Any] = {"lr": rate, "beta1": betas[0], "beta2": betas[1], "eps": epsilon, "weight_decay": 0.0}
        if self._fused:
            named["found_inf"] = self._fault
            torch._fused_adam_(w, g, mean, square, [], counted, amsgrad=False, maximize=False, **named)
        else:
            # It counts by itself.
            counted = [each - 1 for each in counted]
            adam(w, g, mean, square, [], counted, foreach=False, amsgrad=False, maximize=False, **named)

    def _subtract(self, direction: Tensors, ratio: Ratio) -> None:
        """Subtract a direction times the rate and a ratio for each parameter."""
        if isinstance(ratio, np.ndarray):
            # Numbers that can be read without waiting save a pass.
            for w, each, factor in zip(self._w, direction, (self._rate * ratio).tolist(), strict=True):
                w.sub_(each, alpha=factor)
        else:
            torch._foreach_mul_(direction, self._unless(0.0, self._rate * ratio).unbind())
            torch._foreach_sub_(self._w, direction)

    def _rmsprop(self) -> Tensors:
        """The direction of rmsprop_to_sgd."""
        transition = self._settings.transition
        assert transition is not None
        direction = self._decayed(self._g, self._decay)
        own = self._times(direction, self._sgd_share)
        rate = (1 - self._sgd_share) * transition.rmsprop_rate
        # Adam's update of SGD's part, whose mean is the direction itself.
        self._adam(own, direction, direction, (0.0, transition.square_decay), _never(own), -rate)
        return own

    def _descend(self, direction: Tensors, decay: float, ratio: Ratio | None = None) -> None:
        """SGD's update by a direction times a ratio for each parameter, see :func:`hpctrain.common.optim.rules.sgd`.

        Args:
            decay: of the parameters, added to the direction.
        """
        settings, m = self._settings, self._settings.momentum
        velocity = self._slots.get("momentum", [])
        if "previous_rate" in self._slots:
            self._correct(velocity)
        # What the direction and what the change are multiplied by.
        own, rate = (self._rate, 1.0) if m and settings.rate_in_momentum else (1.0, self._rate)
        factors = [own] if ratio is None else (own * ratio).tolist() if isinstance(ratio, np.ndarray) else []
        if not factors or (settings.nesterov and factors != [1.0]):
            # Kernels neither take a device's numbers nor multiply what Nesterov's momentum adds.
            direction, decay = self._decayed(direction, decay), 0.0
            scale = own if ratio is None else (own * ratio).unbind() if isinstance(ratio, torch.Tensor) else factors
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
        if self._fault is None:
            return factor
        if not isinstance(factor, torch.Tensor):
            # Of two numbers torch.where makes one in float32, which would change weights in float64.
            dtype = torch.promote_types(self._w[0].dtype, torch.float32)
            factor = self._fault.new_full((), factor, dtype=dtype)
        return torch.where(self._fault > 0, fault, factor)

    def _correct(self, velocity: Tensors) -> None:
        """Scale the momentum by the rate over the rate of the step before (Goyal et al. 2017, equation 10)."""
        # On the CPU, so that no GPU is waited for, except after loading.
        previous = torch.stack([each.cpu() for each in self._slots["previous_rate"]])
        now = torch.full_like(previous, self._rate)
        torch._foreach_mul_(velocity, _quotient(now, previous, previous > 0).unbind())
        for state, rate in zip(self._states, now.unbind(), strict=True):
            state["previous_rate"] = rate

    def _slot(self, name: str) -> Tensors:
        """What the states have by a name, laid out as the parameters are."""
        found = []
        for state, w in zip(self._states, self._w, strict=True):
            value = local_tensor(state[name])
            if name not in SCALARS and value is state[name]:
                # A state that was loaded may be laid out as the parameter was when it was saved.
                value = state[name] = laid_out(value, w)
            found.append(value)
        return found

    def _decayed(self, direction: Tensors, decay: float) -> Tensors:
        """A direction with the decay added."""
        if not decay:
            return direction
        kept = self._kept("decayed")
        if kept is None:
            return list(torch._foreach_add(direction, self._w, alpha=decay))
        for each, w, total in zip(direction, self._w, kept, strict=True):
            torch.add(each, w, alpha=decay, out=total)
        return kept

    def _times(self, tensors: Tensors, factor: float) -> Tensors:
        """Products."""
        kept = self._kept("times")
        if kept is None:
            return list(torch._foreach_mul(tensors, factor))
        for each, product in zip(tensors, kept, strict=True):
            torch.mul(each, factor, out=product)
        return kept

    def _kept(self, name: str) -> Tensors | None:
        """Memory like the parameters' that this thread's next updates take, as new pages take a CPU longer.

        Returns:
            None where it would be too much, or not a CPU's.
        """
        numbers = sum(each.numel() for each in self._w)
        plain = self._readable and all(each.is_contiguous() for each in self._w)
        if not plain or numbers > _MOST_KEPT:
            return None
        kept, key = _memory.kept, (name, self._w[0].dtype)
        if key not in kept or kept[key].numel() < numbers:
            kept[key] = torch.empty(numbers, dtype=key[1], device="cpu")
        return list(_unflatten_dense_tensors(kept[key][:numbers], self._w))


@functools.cache
def _threads(number: int) -> ThreadPoolExecutor:
    """Threads in which PyTorch's operations are not divided.

    Raises:
        RuntimeError: the system has no more threads, or did not start them in time.
    """
    begun, before = threading.Barrier(number + 1, timeout=_START_SECONDS), torch.get_num_threads()

    def begin() -> None:
        # What a thread first asks for gives it as many as others have.
        torch.get_num_threads()
        torch.set_num_threads(1)
        begun.wait()

    pool = ThreadPoolExecutor(number, "hpctrain-update", begin)
    try:
        for _ in range(number):
            pool.submit(int)
        begun.wait()
    except BaseException:
        # Lets the threads end that wait for others.
        begun.abort()
        raise
    finally:
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


def _never(tensors: Tensors) -> Tensors:
    """After infinitely many updates Adam has nothing to correct."""
    return [torch.full((), math.inf, dtype=torch.float32, device=tensors[0].device)] * len(tensors)


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether its numbers can be read without waiting; what has none, as where memory is tracked, goes a GPU's way."""
    return tensor.is_cpu and type(tensor) in _PLAIN


def _number(parameter: torch.Tensor, name: str) -> torch.Tensor:
    """A number of a parameter's state at its beginning."""
    # Rates are known to the host, counts belong to the kernels.
    device = "cpu" if name == "previous_rate" else parameter.device
    return torch.zeros((), dtype=parameter.dtype, device=device)


def _quotient(numerator: ArrayT, denominator: ArrayT, defined: ArrayT) -> ArrayT:
    """The quotient where it is defined, 1 elsewhere."""
    where: Any = torch.where if isinstance(defined, torch.Tensor) else np.where
    with np.errstate(all="ignore"):
        found: ArrayT = where(defined, numerator / where(defined, denominator, 1.0), 1.0)
    return found

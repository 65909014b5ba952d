"""Tries an optimizer's rule on small stand-ins for its parameters, divided and whole, before it gets divided ones.

If a rule uses more than single elements (norms, factored moments, preconditioners), it depends on PyTorch's DTensors
whether it computes the same numbers, fails, or silently computes others. And an optimizer may keep its parameters where
they cannot be found and replaced. A trial with a copy of the optimizer and its state shows all of that.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import re
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.parallel.moved import check_fits, divided
from hpctrain.worker.adapters.torch.references import Optimizer, optimizers_in, parameters_of, replace
from hpctrain.worker.adapters.torch.steps import reduced_elsewhere

New = Mapping[int, Sequence[nn.Parameter]]

# Enough for what happens every few steps: Lookahead takes its slow weights after 5 or 6, SOAP a new basis after 10.
STEPS = 11
# Sums over the ranks are rounded in another order.
_TOLERANCE = 1e-10
# PyTorch's errors for a maximum, a norm or a quantile of an empty tensor.
_OF_NOTHING = r"[Ee]xpected reduction dim|does not have an identity|must be non-empty"
_KEPT = "keep parameters in lists, dictionaries or attributes of the optimizer, not in functions"
_HINT = (
    "choose an optimizer that docs/optimizers.md lists as exact on such a mesh; or train replicas, without the mesh, "
    "where each rank has whole parameters"
)


def try_rule(optimizer: Optimizer, now: New, *, prepare: Callable[[Optimizer], None], alone: bool) -> None:
    """Raise HpctrainError for an optimizer that would compute other numbers with its new parameters.

    Args:
        optimizer: the optimizer with its old parameters. It stays unchanged.
        now: the replacements by the ``id`` of each old parameter.
        prepare: called with an optimizer that got divided parameters.
        alone: whether other ranks have other parameters, so that the rule for one may not depend on another.
    """
    chosen = _chosen(optimizer, now, 2 if alone else 1)
    if not chosen:
        return
    name = type(optimizer).__name__
    versions = {id(each): each._version for each in parameters_of(optimizer)}
    with _randomness_kept():
        trial = _Trial(optimizer, now, prepare)
        try:
            whole = trial.run(chosen, divide=False)
        except HpctrainError:
            raise
        except Exception as error:
            raise HpctrainError(
                "HT-optimizer-not-movable",
                "{optimizer} fails with other parameters than the model's, as it would get on this mesh: {reason}",
                f"{_KEPT}; or train replicas, without the mesh",
                optimizer=name,
                reason=_describe(error),
            ) from error
        if any(_emptied(_shape(each, new), new, empty=True) != _shape(each, new) for each, new in _pairs(chosen, now)):
            _try_empty(trial, chosen, name)
        try:
            parts = trial.run(chosen, divide=True)
        except Exception as error:
            raise HpctrainError(
                "HT-optimizer-not-divisible",
                "{optimizer} fails with parameters that are divided over ranks: {reason}",
                _HINT,
                optimizer=name,
                reason=_describe(error),
            ) from error
        if any(each._version != versions[id(each)] for each in parameters_of(optimizer)) or not trial.moved(whole):
            raise HpctrainError(
                "HT-optimizer-keeps-parameters",
                "a copy of {optimizer} with other parameters does not update those: it keeps the model's "
                "parameters where ht.distribute cannot replace them",
                _KEPT,
                optimizer=name,
            )
        if not _equal(whole, parts):
            raise HpctrainError(
                "HT-optimizer-wrong-when-divided",
                "{optimizer} gives other numbers with parameters that are divided over ranks than with "
                "whole ones: its rule is not one for each element by itself, and PyTorch's DTensors do "
                "not make up for it",
                _HINT,
                optimizer=name,
            )
        if alone and not _equal(whole[::2], trial.run(chosen[::2], divide=False)):
            raise HpctrainError(
                "HT-optimizer-couples-parameters",
                "{optimizer} updates a parameter depending on the others, and other stages of the pipeline have those",
                "choose an optimizer that updates each parameter by itself, or a mesh without pp",
                optimizer=name,
            )


def _try_empty(trial: _Trial, chosen: Sequence[nn.Parameter], name: str) -> None:
    """Refuse a rule that some rank could not compute for parameters of which it has no rows.

    Every rank tries it alone: with divided parameters one rank would fail while the others wait for it.
    """
    try:
        trial.run(chosen, divide=False, empty=True)
    except Exception as error:
        # Other errors come from the shapes, which divided parameters report in full.
        if re.search(_OF_NOTHING, str(error)):
            raise HpctrainError(
                "HT-optimizer-empty-rows",
                "{optimizer} fails on ranks that have no rows of a parameter: {reason}",
                f"take no more ranks than the smallest parameter has rows; or {_HINT}",
                optimizer=name,
                reason=_describe(error),
            ) from error


class _Trial:
    def __init__(self, optimizer: Optimizer, now: New, prepare: Callable[[Optimizer], None]) -> None:
        self._optimizer, self._now, self._prepare = optimizer, now, prepare
        # Each stand-in has the same values in every run, whichever others there are.
        self._seeds: dict[int, int] = {}

    def run(self, chosen: Sequence[nn.Parameter], *, divide: bool, empty: bool = False) -> list[torch.Tensor]:
        """The stand-ins for the chosen parameters after some steps of a copy of the optimizer.

        Args:
            divide: whether to divide them over the ranks. Collective then.
            empty: whether to replace those of which some rank has no rows by the empty part that it has.
        """
        torch.manual_seed(0)
        random.seed(0)
        self._points = [self._point(old, empty=empty) for old in chosen]
        stand_ins = {id(old): point.parameter(divide) for old, point in zip(chosen, self._points, strict=True)}

        def move(name: str, value: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            check_fits(name, value, old)
            cut = value[tuple(slice(size) for size in new.shape)] if value.shape == old.shape else value
            cut = cut.detach().clone().to(_wide(value.dtype))
            return divided(name, cut, cut if cut.dim() else old, new)

        def instead(each: torch.Tensor) -> list[nn.Parameter] | None:
            return [stand_ins[id(each)]] if id(each) in stand_ins else [] if id(each) in self._now else None

        twin = _copied(self._optimizer)
        replace(twin, instead, move)
        for each in optimizers_in(twin):
            reduced_elsewhere.add(each)
            if divide:
                self._prepare(each)
            _start_warm(each)
        # For ScheduleFree: a script may call its train() only after ht.distribute.
        getattr(twin, "train", lambda: None)()
        own = list(stand_ins.values())

        def closure() -> float:
            return sum(point.differentiate(each) for point, each in zip(self._points, own, strict=True))

        for _ in range(STEPS):
            closure()
            _step(twin, closure)
        return [_whole(each) for each in own]

    def _point(self, old: nn.Parameter, *, empty: bool) -> _Point:
        return _Point(old, self._now[id(old)][0], self._seeds.setdefault(id(old), len(self._seeds)), empty=empty)

    def moved(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the steps have changed any stand-in."""
        return any(not torch.equal(point.begin, tensor) for point, tensor in zip(self._points, tensors, strict=True))


class _Point:
    """A stand-in's initial values, and the quadratic function that the trial minimises."""

    def __init__(self, old: nn.Parameter, new: nn.Parameter, seed: int, *, empty: bool) -> None:
        generator = torch.Generator("cpu").manual_seed(seed)
        shape, self._like = _emptied(_shape(old, new), new, empty=empty), new
        self._gradient = old.requires_grad

        def drawn() -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=_wide(old.dtype), device="cpu").to(old.device)

        self.begin, self._target, self._scale = drawn(), drawn(), drawn().abs() * 0.1

    def parameter(self, divide: bool) -> nn.Parameter:
        self._divide = divide and isinstance(self._like, DTensor)
        return nn.Parameter(self._placed(self.begin.clone()), requires_grad=self._gradient)

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._divide:
            return tensor
        like = cast(DTensor, self._like)
        # FSDP2 over tensor parallelism has a Shard of its own, with another order of the parts.
        placements = [Shard(each.dim) if each.is_shard() else each for each in like.placements]  # type: ignore[attr-defined]
        return distribute_tensor(tensor, like.device_mesh, placements, src_data_rank=None)

    @torch.no_grad()
    def differentiate(self, parameter: nn.Parameter) -> float:
        """Set the gradient; returns the function's value."""
        if not self._gradient:
            return 0.0
        off = parameter - self._placed(self._target)
        parameter.grad = off * self._placed(self._scale)
        return float(_whole(off * off.conj() * self._placed(self._scale)).abs().sum()) / 2


def _chosen(optimizer: Optimizer, now: New, count: int) -> list[nn.Parameter]:
    """Up to ``count`` parameters of each kind that a rule may distinguish: by group settings, shape and layout."""
    kinds: dict[Any, list[nn.Parameter]] = {}
    for group in optimizer.param_groups:
        settings = sorted((key, str(value)) for key, value in group.items() if isinstance(value, bool | str | None))
        for old in group["params"]:
            for new in now[id(old)][:1]:
                layout = str(getattr(new, "placements", None)), str(getattr(new, "device_mesh", None))
                kind = (str(settings), _shape(old, new), old.dtype, old.requires_grad, layout)
                kinds.setdefault(kind, []).append(old)
    return [each for olds in kinds.values() for each in olds[:count]]


def _shape(old: torch.Tensor, new: torch.Tensor) -> tuple[int, ...]:
    """A small shape that leaves the same remainders when divided over the ranks."""
    return tuple(
        size if size < max(8, 3 * n) else math.ceil(6 / n) * n + size % n
        for size, n in zip(new.shape, _ranks(new), strict=True)
    )


def _ranks(new: torch.Tensor) -> list[int]:
    """By how many ranks each dimension is divided."""
    ranks = [1] * new.dim()
    if isinstance(new, DTensor):
        for axis, placement in enumerate(new.placements):
            if placement.is_shard():
                ranks[placement.dim] *= new.device_mesh.size(axis)  # type: ignore[attr-defined]
    return ranks


def _emptied(shape: tuple[int, ...], new: torch.Tensor, *, empty: bool) -> tuple[int, ...]:
    """With ``empty``, the shape of an empty part if some rank has one of a parameter of this shape."""
    if not empty:
        return shape
    return tuple(
        0 if n > 1 and math.ceil(size / n) * (n - 1) >= size else size
        for size, n in zip(shape, _ranks(new), strict=True)
    )


def _pairs(chosen: Sequence[nn.Parameter], now: New) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    return ((each, now[id(each)][0]) for each in chosen)


def _copied(optimizer: Optimizer) -> Optimizer:
    """A copy that shares nothing with the optimizer but parameters, what is kept for each of them, and modules."""
    every = optimizers_in(optimizer)
    memo: dict[int, Any] = {}
    for each in every:
        memo.update({id(parameter): parameter for parameter in parameters_of(each)})
        state = vars(each).get("state", {})
        kept = torch.utils._pytree.tree_leaves(list(state.values())) if state else []
        memo.update({id(value): value for value in kept if isinstance(value, torch.Tensor)})
        memo.update({id(value): value for value in vars(each).values() if isinstance(value, nn.Module)})
    twins = [type(each).__new__(type(each)) for each in every]
    memo.update({id(each): twin for each, twin in zip(every, twins, strict=True)})
    for each, twin in zip(every, twins, strict=True):
        for name, value in vars(each).items():
            # Skips methods that schedulers replaced: these step the original optimizer.
            if not (callable(value) and hasattr(type(each), name)):
                vars(twin)[name] = OrderedDict() if name.startswith("_optimizer_") else copy.deepcopy(value, memo)
    return twins[0]


def _step(optimizer: Optimizer, closure: Callable[[], float]) -> None:
    if inspect.unwrap(type(optimizer).step) is not inspect.unwrap(Optimizer.step):
        optimizer.step(*(closure,) if len(inspect.signature(optimizer.step).parameters) else ())
        return
    # SAM without a closure has two steps of its own.
    for name in ("first_step", "second_step"):
        if hasattr(optimizer, name):
            getattr(optimizer, name)()
            closure()


def _start_warm(optimizer: Optimizer) -> None:
    """Raise a learning rate of 0, with which a warm-up may begin, since the trial would show nothing."""
    for group in optimizer.param_groups:
        if "lr" in group and not float(group["lr"]):
            group["lr"] = group["lr"] + 0.01


@contextmanager
def _randomness_kept() -> Iterator[None]:
    """Restore the generators, so that the script's random numbers are the same with and without the trial."""
    state = random.getstate()
    with torch.random.fork_rng():
        yield
    random.setstate(state)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else dtype


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.detach()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole


def _equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(
        torch.allclose(a, b.view(a.shape), rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


def _describe(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    where = f"in {frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{line})"
    # Sizes differ between ranks, and all have to report the same text.
    return f"{type(error).__name__}: {re.sub(r'[0-9]+', '…', lines[0]) if lines else where}"

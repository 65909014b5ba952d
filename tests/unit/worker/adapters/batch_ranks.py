"""Data ranks that are threads of one process, and what each of them computes beside what one process computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from hpctrain.worker.adapters.torch.batch import derivatives, elementwise
from hpctrain.worker.adapters.torch.batch.ranks import DataRanks, Rows
from hpctrain.worker.adapters.torch.batch.tensor import BatchTensor

_own = threading.local()
_PATIENCE = 20
_stream = threading.Lock()
# One thread computes at a time: ranks are processes, and not all of PyTorch can be called by several threads at once.
_turn = threading.Lock()


def seeded(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that draws random numbers: of one stream, which threads share, each time from its beginning."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        with _stream:
            torch.manual_seed(1)
            return call(*args, **kwargs)

    return draw


class Meeting:
    """Where the threads of one run exchange what they have."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=_PATIENCE)
        self._slots: list[Any] = [None] * size

    def exchange(self, rank: int, what: str, value: Any) -> list[Any]:
        """The values of all ranks, of which each has to ask for the same thing."""
        self._slots[rank] = what, value
        _turn.release()
        try:
            self._barrier.wait()
            slots = list(self._slots)
            self._barrier.wait()
        finally:
            _turn.acquire()
        asked = [name for name, _ in slots]
        assert len(set(asked)) == 1, f"the ranks compute different things: {asked}"
        return [value for _, value in slots]

    def leave(self) -> None:
        """End the others' waiting."""
        self._barrier.abort()


class ThreadRanks(DataRanks):
    """The data ranks as one thread sees them."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self.gathered = rank, meeting.size, 0
        self._meeting = meeting

    def sum(self, own: torch.Tensor, name: str = "a sum") -> torch.Tensor:
        own = own.detach()
        found = self._meeting.exchange(self.rank, f"sum {name} {tuple(own.shape)} {own.dtype}", own.clone())
        wide = torch.float32 if own.dtype in (torch.float16, torch.bfloat16) else own.dtype
        return torch.stack([each.to(wide) for each in found]).sum(0).to(own.dtype)

    def _meet(self, values: list[float], name: str) -> list[float]:
        found = self._meeting.exchange(self.rank, f"{len(values)} numbers of {name}", values)
        return [sum(each) for each in zip(*found, strict=True)]

    def gather(self, own: torch.Tensor, sizes: Sequence[int], dim: int, name: str = "gathered rows") -> torch.Tensor:
        assert own.shape[dim] == sizes[self.rank]
        return torch.cat(
            self._meeting.exchange(self.rank, f"gather {name} {dim} {own.dtype}", own.detach().clone()), dim
        )


@contextmanager
def threads_as_ranks() -> Iterator[None]:
    """Let threads be data ranks, each with the state that a process has."""
    engine, apply = torch.autograd._engine_run_backward, torch.autograd.Function.__dict__["apply"]
    with (
        mock.patch.object(derivatives, "known_ranks", lambda: getattr(_own, "ranks", None)),
        mock.patch.object(elementwise, "is_reduced", lambda tensor: hasattr(tensor, "reduced")),
    ):
        derivatives.watch_engine()
        derivatives.gather_for_own_functions()
        try:
            yield
        finally:
            torch.autograd._engine_run_backward = engine
            torch.autograd.Function.apply = apply


def on_ranks(size: int, body: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What each rank's call of ``body`` returned.

    Raises:
        the first rank's error, where calls failed.
    """
    meeting = Meeting(size)
    returned: list[Any] = [None] * size
    errors: list[BaseException] = []

    def call(rank: int) -> None:
        _own.ranks = ThreadRanks(rank, meeting)
        with _turn:
            try:
                returned[rank] = body(_own.ranks)
            except threading.BrokenBarrierError as error:
                errors.append(error)
            except BaseException as error:
                errors.insert(0, error)
                meeting.leave()

    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return returned


@dataclass(frozen=True)
class Operand:
    """A tensor from which something is computed.

    Attributes:
        whole: its values.
        sizes: how many rows each rank holds; None for a plain tensor.
        dim: the dimension of the rows.
        gradient: whether it requires one.
        reduced: whether a reducer averages its gradients.
    """

    whole: torch.Tensor
    sizes: tuple[int, ...] | None = None
    dim: int = 0
    gradient: bool = False
    reduced: bool = False

    def leaf(self, ranks: ThreadRanks | None) -> torch.Tensor:
        """The tensor that a rank's script has, or that of one process."""
        if ranks is None or self.sizes is None:
            leaf = self.whole.clone().requires_grad_(self.gradient)
            if self.reduced:
                leaf.reduced = True  # type: ignore[attr-defined]
            return leaf
        rows = Rows(ranks, self.sizes, self.dim)
        own = self.whole.narrow(self.dim, rows.begin, rows.size).clone().requires_grad_(self.gradient)
        return BatchTensor(own, rows)


Outcome = list[tuple[str, torch.Tensor | None]]


def outcome(
    body: Callable[..., Any], operands: Sequence[Operand], ranks: ThreadRanks | None = None, *, twice: bool = True
) -> Outcome:
    """The values that a function gives, their gradients, and gradients of these."""
    leaves = [each.leaf(ranks) for each in operands]
    if (result := body(*leaves)) is NotImplemented:
        raise TypeError("what Python makes of NotImplemented")
    tensors = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
    found: Outcome = [(f"value {number} of {_kind(result)}", _whole(each)) for number, each in enumerate(tensors)]
    found += [("operand", _whole(each)) for each in leaves]  # which may have been changed
    wanted = [each for each in leaves if each.requires_grad]
    differentiable = [each for each in tensors if each.requires_grad]
    if not wanted or not differentiable:
        return found
    loss = sum((_weighted(each) for each in differentiable), torch.zeros((), dtype=torch.float64))
    gradients = torch.autograd.grad(loss, wanted, create_graph=twice, allow_unused=True, retain_graph=True)
    found += [("gradient", _whole(each)) for each in gradients]
    if twice:
        loss = loss + sum(_weighted(each * each) for each in gradients if each is not None)
    loss.backward()
    for each in leaves:
        if each.requires_grad:
            gradient = _whole(each.grad)
            if ranks is not None and hasattr(each, "reduced") and gradient is not None:
                gradient = ranks.sum(gradient, "a reduced gradient") / ranks.size
            found.append(("gradient after backward", gradient))
    return found


def _kind(result: Any) -> str:
    names = {"BatchTensor": "Tensor", "list": "sequence", "tuple": "sequence"}
    return names.get(type(result).__name__, type(result).__name__)


def _whole(value: torch.Tensor | None) -> torch.Tensor | None:
    if value is None:
        return None
    return (value.whole() if isinstance(value, BatchTensor) else value).detach().clone()


def _weighted(value: torch.Tensor) -> torch.Tensor:
    """A number to which each element contributes by another factor."""
    whole = value.whole() if isinstance(value, BatchTensor) else value
    whole = torch.view_as_real(whole.resolve_conj()) if whole.is_complex() else whole
    weights = torch.linspace(0.5, 1.5, whole.numel(), dtype=torch.float64).reshape(whole.shape)
    return (whole.double() * weights).sum()


_HALVES = (torch.float16, torch.bfloat16, torch.complex32)
_TOLERANCES = {torch.float32: 1e-5, torch.complex64: 1e-5, **dict.fromkeys(_HALVES, 1e-2)}


def difference(ours: Outcome, theirs: Outcome, tolerance: float) -> str:
    """How two outcomes differ; empty where they do not."""
    if [name for name, _ in ours] != [name for name, _ in theirs]:
        return f"{[name for name, _ in ours]} instead of {[name for name, _ in theirs]}"
    tolerance = max(_TOLERANCES.get(each.dtype, tolerance) for _, each in theirs if each is not None)
    for (name, own), (_, other) in zip(ours, theirs, strict=True):
        own = torch.zeros_like(other) if own is None and other is not None else own
        other = torch.zeros_like(own) if other is None and own is not None else other
        if own is None or other is None:
            continue
        if own.shape != other.shape or own.dtype != other.dtype:
            return f"{name}: {own.dtype} {tuple(own.shape)} instead of {other.dtype} {tuple(other.shape)}"
        scale = (
            max(1.0, float(other.abs().nan_to_num(0, 0, 0).max()))
            if other.numel() and other.dtype != torch.bool
            else 1.0
        )
        if not torch.allclose(own, other, rtol=0, atol=tolerance * scale, equal_nan=True):
            return f"{name}: {own} instead of {other}"
    return ""

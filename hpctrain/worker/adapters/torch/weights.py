"""Weights gradients by their number of samples where batches do not divide evenly over the ranks.

A rank computes the mean over its own share of a global batch. Where shares differ, its gradient is multiplied by
own samples x ranks / samples of the batch, so that the mean over the ranks is the mean over the batch. A script may
draw batches ahead, twice or in vain, so the last batch drawn need not be the one. The forward pass decides:

1. A forward pass belongs to the batch whose memory its arguments lie in (except slices of samples, see below).
   Hidden states, where parts of a network are called one by one, belong to the forward pass that they come from.
2. Where its arguments are copies (``x.to(device)``, ``x.float() / 255``), their shape decides: the share of exactly one
   of the batch sizes that the loaders yield. Two batch sizes differ in the share of at least one rank. Where a rank's
   shares of two batch sizes are equal and their weights are not, it assumes the batch drawn last; a rank whose shares
   differ ends the run if that is wrong.
3. The results of a forward pass have hooks, so a backward pass knows the forward passes that it goes through, however
   late it comes, and each parameter gets the weight of those that it took part in.
4. A parameter that no such forward pass covers (a function that was compiled as a whole, ``F.linear(x, p)``) gets the
   weight of the batch drawn last, if until now exactly one batch was drawn before each backward pass.
5. A forward pass of nothing but numbers from 0 on (``positions(torch.arange(n))``) belongs to no batch. Its gradients
   get the weight of the forward passes that got its result.

A weight that remains unknown is refused at the first gradient, before any reduction. So is a slice of the samples of an
uneven batch: ranks would cut it at other places than one process. Loaders whose batches all divide evenly cost
nothing: no forward pass or gradient is watched, and no use is refused.

A refusal ends a run. Where it does not, as in a notebook, the next training epoch forgets the batch sizes of the
refused loader and the order of its batches.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.data_ranks import data_place
from hpctrain.worker.adapters.torch.batches import Batches, Mark, is_whole, tensors_in
from hpctrain.worker.adapters.torch.forwards import watch_forwards
from hpctrain.worker.adapters.torch.outputs import Consumers, Origin, Outputs, is_whole_output
from hpctrain.worker.comm.base import Communicator

# How many samples a rank without one of its own computes, with weight 0. Not 1, so that the numbers of samples on all
# ranks together identify a batch size.
SPARE_SAMPLES = 2

# Enough for the positions of a long text. Comparing more numbers in each forward pass takes too long on a GPU.
_MOST_NUMBERS = 2**17

_HINT = (
    "pass the model the tensors that the loader yields, or views or copies of whole ones; or let every batch divide "
    "evenly: a batch_size that is a multiple of the ranks, and drop_last=True"
)


def _problem(code: str, sentence: str) -> HpctrainError:
    return HpctrainError(code, f"{sentence}, and the batches of a loader do not divide evenly over the ranks", _HINT)


_FITS_NONE = _problem(
    "HT-batch-unknown-shape",
    "hpctrain cannot tell which batch a forward pass computed: its inputs are copies, of a shape that fits none",
)
_FITS_SEVERAL = _problem(
    "HT-batch-ambiguous-shape",
    "hpctrain cannot tell which batch a forward pass computed: its inputs are copies, of a shape that fits batches of "
    "different weights",
)
_SEVERAL = _problem("HT-batch-several-at-once", "a forward pass computed several batches at once, of different weights")
_PART = _problem("HT-batch-part", "a forward pass got a part of the samples of a batch that does not divide evenly")
_EVALUATION = _problem(
    "HT-batch-of-evaluation",
    "a backward pass goes through a batch of an evaluation, whose samples have no weights",
)
_BACKWARD = _problem("HT-batch-several-in-backward", "a backward pass goes through batches of different weights")
_LOSS = _problem(
    "HT-mean-loss-of-other-batch", "ht.mean_loss, called within a forward pass, took it for one of another batch"
)
_NO_FORWARD = _problem(
    "HT-batch-without-module-call",
    "hpctrain cannot tell which batch a gradient is of: its forward pass was not a call of a module (a function "
    "compiled as a whole, model.forward or model.compile()), and batches were not drawn one before each backward pass",
)

_all: weakref.WeakKeyDictionary[Communicator, BatchWeights] = weakref.WeakKeyDictionary()


def batch_weights(comm: Communicator) -> BatchWeights:
    """The weights for the loaders that were sharded over a communicator's ranks."""
    if comm not in _all:
        _all[comm] = BatchWeights(comm)
    return _all[comm]


def own_samples(total: int, rank: int, ranks: int) -> int:
    """How many samples of a global batch of ``total`` are a rank's own."""
    return total // ranks + (rank < total % ranks)


def weight(total: int, rank: int, ranks: int) -> float:
    """The factor of a rank's mean gradient over its share of a global batch of ``total`` samples."""
    return own_samples(total, rank, ranks) * ranks / total


def computed_samples(total: int, rank: int, ranks: int) -> int:
    """How many samples a rank computes, including those without weight."""
    return own_samples(total, rank, ranks) or SPARE_SAMPLES


@dataclass(frozen=True, eq=False)
class _Forward:
    """One forward pass: its weight, or the error if that is unknown, and the parameters that it may have used.

    A pass without a batch has the weights of the passes that got its result.
    """

    weight: float
    problem: HpctrainError | None
    parameters: frozenset[int]
    consumers: Consumers | None = None

    @property
    def weights(self) -> Set[float]:
        return {self.weight} if self.consumers is None else self.consumers.weights


class BatchWeights:
    """The weights of the batches that one communicator's loaders yield. It is notified of draws and forward passes."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = weakref.ref(comm)
        self._rank, self._ranks = data_place(comm)
        self._totals: set[int] = set()
        self._weights: dict[int, float] = {}
        self._uneven = False
        self._look_alike = False
        self._batches = Batches()
        self._outputs = Outputs()
        self._parameters: list[weakref.ref[torch.nn.Parameter]] = []
        # FSDP2 has two tensors for one parameter, the divided and the gathered: the id of the other one, by either.
        self._others = WeakIdKeyDictionary()
        self._watching = False
        self._refused = False
        self._last: int | None = None
        self._unused_draws = 0
        self._passes = 0
        self.epochs_forgotten = 0
        self._draws_of_pass = self._smallest = self._passes_before_draw = 0
        self._in_step = True
        self._one_thread = True
        self._backward: list[_Forward] | None = None
        self._lock = threading.RLock()

    def expect(self, totals: Iterable[int], *, evaluation: bool, uneven: bool = False) -> None:
        """Record the sizes over all ranks of the batches that a loader is about to yield.

        Args:
            uneven: whether some may have sizes that are not known yet.
        """
        with self._lock:
            if comm := self._comm():
                self._rank, self._ranks = data_place(comm)
            if not evaluation:
                if self._refused:
                    self._forget()
                self._know(totals)
            if not self._watching and ((uneven and self._ranks > 1) or any(total % self._ranks for total in totals)):
                self._count_passes()
                self._watching = True
                watch_forwards(self)
                for reference in self._parameters:
                    if (parameter := reference()) is not None:
                        self._watch(parameter)
                self._parameters.clear()

    def _know(self, totals: Iterable[int]) -> None:
        self._totals.update(totals)
        self._weights = {total: weight(total, self._rank, self._ranks) for total in self._totals}
        self._look_alike = look_alike(frozenset(self._totals), self._ranks)
        self._uneven = any(total % self._ranks for total in self._totals)

    def _forget(self) -> None:
        self._refused = False
        self.epochs_forgotten += 1
        self._totals.clear()
        self._last = None
        self._unused_draws = 0
        self._in_step = self._one_thread = True

    def drawn(self, batch: Any, total: int, *, evaluation: bool) -> None:
        """Record that a loader yields this batch."""
        with self._lock:
            if self._watching:
                self._batches.add(batch, None if evaluation else total, self._count(total))
            if evaluation:
                return
            if total not in self._totals:  # its epoch began before _forget()
                self._know({total})
            if threading.current_thread() is threading.main_thread():
                self._backward = None  # set if an error ended the last backward pass
            else:
                self._one_thread = False
            if not self._watching:
                self._count_passes()
            self._count_draw(total)
            self._in_step &= self._unused_draws == 0
            self._unused_draws += 1
            self._last = total

    def forward_done(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Find the batch of a forward pass, and record its weight for the backward pass through it."""
        with self._lock:
            self._backward = None
            given = list(tensors_in(inputs))
            consumers = Consumers() if given and all(map(self._is_numbering, given)) else None
            value, problem = (1.0, None) if consumers is not None else self._weight_of(given)
            for each in set[Consumers]().union(*map(self._outputs.without_batch, given)):
                each.problem = each.problem or problem
                each.weights.add(value)
            # Looked up in each pass because a layer may have been replaced.
            forward = _Forward(value, problem, self._ids(module.parameters()), consumers)
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._reached(forward))
                with self._lock:
                    if consumers is None:
                        self._outputs.add(tensor, value, problem)
                    else:
                        self._outputs.add_without_batch(tensor, consumers)

    def _is_numbering(self, tensor: torch.Tensor) -> bool:
        """Whether it holds 0, 1, 2 … and is no tensor of a batch. Waits for a GPU, so not while a graph is captured."""
        return (
            tensor.dtype in (torch.int64, torch.int32)
            and tensor.dim() > 0
            and _MOST_NUMBERS >= tensor.numel() == tensor.shape[-1] > 1
            and not self._batches.marks(tensor)
            and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
            and torch.equal(tensor.flatten(), torch.arange(tensor.numel(), dtype=tensor.dtype, device=tensor.device))
        )

    def weigh(self, parameter: torch.nn.Parameter) -> None:
        """Apply the weight to a parameter's gradient from now on, before it is added to others."""
        with self._lock:
            if self._watching:
                self._watch(parameter)
            else:
                self._parameters.append(weakref.ref(parameter))

    def identify(self, one: torch.nn.Parameter, other: torch.nn.Parameter) -> None:
        """Record that two tensors are one parameter: FSDP2's gathered one, and the one that it is gathered from."""
        self._others[one], self._others[other] = id(other), id(one)

    def _ids(self, parameters: Iterable[torch.nn.Parameter]) -> frozenset[int]:
        found = list(parameters)
        others = (self._others.get(each) for each in found) if self._others else ()
        return frozenset(map(id, found)).union(each for each in others if each is not None)

    def _watch(self, parameter: torch.nn.Parameter) -> None:
        key = id(parameter)

        def weigh(gradient: torch.Tensor) -> torch.Tensor | None:
            value = self.of_backward(key)
            if value == 1.0:
                return None
            # Not 0 x gradient: a rank without samples must not pass on a NaN.
            return gradient * value if value else torch.zeros_like(gradient)

        with unfrozen(parameter):
            parameter.register_hook(weigh)

    def of_backward(self, parameter: int | None) -> float:
        """The weight of the running backward pass at a parameter, by its ``id``; None for the weight of the whole pass.

        Raises:
            HpctrainError: it cannot be known, or the gradient is of batches of different weights.
        """
        with self._lock:
            return self._weight_for(parameter)

    def of_last_draw(self) -> float:
        """The weight of the batch that was drawn last."""
        with self._lock:
            return 1.0 if self._last is None else self._weights[self._last]

    def of_inputs(self, inputs: Any) -> Callable[[], float]:
        """A function that returns the weight of what a model computes from its inputs, for callers that apply it later.

        The function raises HpctrainError where the weight cannot be known.
        """
        with self._lock:
            value, problem = self._weight_of(list(tensors_in(inputs))) if self._watching else (1.0, None)

        def known() -> float:
            if problem:
                raise self._refusal(problem)
            return value

        return known

    def of_loss(self, loss: torch.Tensor) -> tuple[float, bool]:
        """The weight that the gradients of a loss will get, and whether it is known by what it was computed from.

        Raises:
            HpctrainError: several batches were drawn since the last gradients, and one of them has no sample for some
                rank: counted together, the samples which that rank computes in its place would count too.
        """
        with self._lock:
            if self._draws_of_pass > 1 and self._smallest < self._ranks:
                raise HpctrainError(
                    "HT-mean-loss-too-few-samples",
                    "ht.mean_loss: a batch of {samples} samples has none for some of {ranks} ranks, and "
                    "the samples that they compute in their place would be counted",
                    "use drop_last=True, or a larger batch_size",
                    samples=self._smallest,
                    ranks=self._ranks,
                )
            if not self._watching or not loss.requires_grad:
                return 1.0, True
            weights = {origin.weight for origin in self._outputs.origins(loss) if not origin.problem}
            if len(weights) == 1:
                return weights.pop(), True
            # The loss was computed within a model's forward pass, or by a function that was compiled as a whole. The
            # backward pass checks the assumption.
            return (1.0 if self._last is None else self._weights[self._last]), False

    @property
    def in_use(self) -> bool:
        """Whether a batch of a training was drawn."""
        return self._last is not None

    @property
    def totals(self) -> tuple[int, ...]:
        """The samples of the global batches of a training, those of the batch that was drawn last first."""
        return (self._last or 0, *sorted(self._totals - {self._last}))

    def behind(self, node: torch.autograd.graph.Node) -> float:
        """The weight that the gradients of a part of a loss will get; NaN if the part depends on several batches."""
        with self._lock:
            if not self._watching:
                return 1.0
            weights = {origin.weight for origin in self._outputs.behind(node) if not origin.problem}
            if not weights and self._last is not None:
                weights = {self._weights[self._last]}
            return weights.pop() if len(weights) == 1 else math.nan

    def check_assumed(self, weight: float) -> None:
        """Within a backward pass, raise HpctrainError if the weight assumed for a loss is not its forward pass's."""
        with self._lock:
            if self._watching and _weights(self._forwards()) - {weight}:
                raise self._refusal(_LOSS)

    def _weight_of(self, tensors: list[torch.Tensor]) -> tuple[float, HpctrainError | None]:
        """The weight of what a forward pass with these inputs computes, or why it cannot be known."""
        by_memory: set[float | None] | None = None
        copies: list[torch.Tensor] = []
        for tensor in tensors:
            weights, problem = self._weights_by_memory(tensor)
            if problem:
                return 0.0, problem
            if weights is None:
                copies.append(tensor)
            else:
                by_memory = weights if by_memory is None else by_memory & weights
        if by_memory == {None}:
            return 0.0, _EVALUATION
        if not self._uneven and not (by_memory or set()) - {1.0, None}:
            return 1.0, None
        counts = self._batches.counts(copies)
        return self._weight_by_count(counts) if by_memory is None else self._weight_by_memory(by_memory, counts)

    def _weights_by_memory(self, tensor: torch.Tensor) -> tuple[set[float | None] | None, HpctrainError | None]:
        """The weights that an input may have, None for a copy; or why it has none."""
        origins = self._outputs.origins(tensor)
        problem = next((each.problem for each in origins if each.problem), None)
        if not origins:
            marks = self._batches.marks(tensor)
            if not marks:
                return None, None
            weights = {self._weight_of_mark(mark) for mark in marks if self._is_whole(mark, tensor)}
        else:
            # Unlike batches that share memory, all of these went into the tensor.
            weights = {each.weight for each in origins}
            if len(weights) > 1:
                problem = problem or _SEVERAL
            if not all(self._is_whole_output(each, tensor) for each in origins):
                weights.clear()
        return weights, problem or (None if weights else _PART)

    def _weight_by_memory(self, weights: set[float | None], counts: set[int]) -> tuple[float, HpctrainError | None]:
        known = {each for each in weights if each is not None}
        if len(known) > 1:
            # Several batches share memory, such as a constant that is part of each: the other inputs may decide.
            known &= {self._weights[total] for total in self._totals if self._count(total) in counts}
        if len(known) != 1:
            return 0.0, _SEVERAL
        return known.pop(), None

    def _weight_by_count(self, counts: set[int]) -> tuple[float, HpctrainError | None]:
        totals = {total for total in self._totals if self._count(total) in counts}
        if not totals:
            return 0.0, _FITS_NONE
        if self._look_alike:
            last = self._last
            if last is None or not self._one_thread or {self._count(total) for total in totals} != {self._count(last)}:
                return 0.0, _FITS_SEVERAL
            return self._weights[last], None
        weights = {self._weights[total] for total in totals}
        return (weights.pop(), None) if len(weights) == 1 else (0.0, _FITS_SEVERAL)

    def _weight_of_mark(self, mark: Mark) -> float | None:
        return None if mark.total is None else weight(mark.total, self._rank, self._ranks)

    def _is_whole(self, mark: Mark, tensor: torch.Tensor) -> bool:
        even = mark.total is None or mark.total % self._ranks == 0
        return even or is_whole(mark, tensor, self._count(mark.total or 0))

    def _is_whole_output(self, origin: Origin, tensor: torch.Tensor) -> bool:
        if origin.weight == 1.0:  # only batches that divide evenly have this weight
            return True
        counts = [self._count(total) for total in self._totals if self._weights[total] == origin.weight]
        return bool(counts) and all(is_whole_output(origin, tensor, count) for count in counts)

    def _count(self, total: int) -> int:
        return computed_samples(total, self._rank, self._ranks)

    def _reached(self, forward: _Forward) -> Callable[[torch.Tensor], None]:
        def reached(_: torch.Tensor) -> None:
            with self._lock:
                forwards = self._forwards()
                if forward not in forwards:
                    forwards.append(forward)

        return reached

    def _forwards(self) -> list[_Forward]:
        """The forward passes that the running backward pass has reached."""
        if self._backward is None:
            self._backward = []
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_done)
        return self._backward

    def _backward_done(self) -> None:
        self._backward = None

    def _count_draw(self, total: int) -> None:
        """Count the batches drawn for one update, as far as that can be known."""
        comm = self._comm()
        passes = 0 if comm is None else comm.passes
        if passes != self._passes_before_draw:
            self._passes_before_draw, self._draws_of_pass = passes, 0
        self._draws_of_pass += 1
        self._smallest = total if self._draws_of_pass == 1 else min(total, self._smallest)

    def _count_passes(self) -> None:
        """Where no gradient is watched, a backward pass that reduces shows that the drawn batches were used."""
        comm = self._comm()
        if comm is not None and comm.passes != self._passes:
            self._passes = comm.passes
            self._unused_draws = 0

    def _weight_for(self, parameter: int | None) -> float:
        self._unused_draws = 0
        if not self._watching:
            return 1.0
        reached = [forward for forward in self._forwards() if parameter is None or parameter in forward.parameters]
        for forward in reached:
            if problem := forward.problem or (forward.consumers.problem if forward.consumers else None):
                raise self._refusal(problem)
        if not (weights := _weights(reached)):
            return self._weight_by_order(_weights(each for each in self._forwards() if not each.problem))
        if len(weights) > 1:
            raise self._refusal(_BACKWARD)
        return weights.pop()

    def _weight_by_order(self, others: set[float]) -> float:
        """The weight of a gradient without a known forward pass, in a backward pass that also reaches ``others``."""
        if not self._uneven or self._last is None:
            return 1.0
        if self._in_step and self._one_thread and others <= {self._weights[self._last]}:
            return self._weights[self._last]
        raise self._refusal(_NO_FORWARD)

    def _refusal(self, problem: HpctrainError) -> HpctrainError:
        self._refused = True
        # A raised error keeps its traceback.
        return problem.but()


def _weights(forwards: Iterable[_Forward]) -> set[float]:
    return set[float]().union(*(each.weights for each in forwards))


@contextmanager
def unfrozen(parameter: torch.nn.Parameter) -> Iterator[torch.nn.Parameter]:
    """A context manager in which a frozen parameter accepts hooks, which PyTorch refuses otherwise."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    yield parameter
    parameter.requires_grad_(trained)


@lru_cache(maxsize=64)
def look_alike(totals: frozenset[int], ranks: int) -> bool:
    """Whether a rank computes equally many samples of two of these batches, but with different weights."""
    for rank in range(ranks):
        kinds = {(computed_samples(total, rank, ranks), weight(total, rank, ranks)) for total in totals}
        if len({count for count, _ in kinds}) < len(kinds):
            return True
    return False

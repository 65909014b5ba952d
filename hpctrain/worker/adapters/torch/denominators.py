"""Refuses losses whose mean over the ranks is not that of the batch, because ranks divide by different counts.

Before each backward pass the graph of its loss is read (:mod:`hpctrain.worker.adapters.torch.divisors`). What it is
divided by may differ between ranks as their numbers of samples do, and in no other way. As long as nothing changes on
any rank, the ranks' last comparison holds. A change sets a flag that is reduced with the gradients, and the ranks
compare again before the optimizer's step. Losses on a GPU are read only at the first steps and every _EVERY steps,
because reading waits for the GPU.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.data_ranks import data_place
from hpctrain.worker.adapters.torch.backward_passes import watch_backward
from hpctrain.worker.adapters.torch.divisors import ROUNDING, Divided, divisors
from hpctrain.worker.adapters.torch.sums import DivisorProblem, divisor_problem
from hpctrain.worker.adapters.torch.turns import turns_of
from hpctrain.worker.adapters.torch.weights import batch_weights
from hpctrain.worker.comm import Communicator

_FIRST_STEPS = 3
# After so many steps with the same losses, a number that stays in them is taken for a constant.
_REPEATED = 2
_EVERY = 100
# The most backward passes kept without a step: a script that updates its parameters by hand never makes one.
_MOST_PASSES = 10_000

_SUMMED = "let the loss be ht.sum_loss(total); or divide the sum by the number of this rank's samples: total / len(x)"
_COUNTED = (
    "give the sum and what it is divided by: loss = ht.mean_loss(total, count), such as "
    'F.cross_entropy(logits, y, reduction="sum") and (y != -100).sum(); a mean that a model returns: '
    "ht.mean_loss(loss * count, count). Where every rank's own mean is meant to count alike: ht.mean_loss(loss, 1)"
)

_all: weakref.WeakKeyDictionary[Communicator, Denominators] = weakref.WeakKeyDictionary()


class LossPart(NamedTuple):
    """A part of a loss.

    Attributes:
        weight: the weight of its gradients on this rank; NaN where that is unknown.
        samples: the sizes of the global batches, first that of the last one drawn before its backward pass.
    """

    weight: float
    divided: Divided
    samples: tuple[int, ...]


Pass = tuple[LossPart, ...]
"""The parts of the loss at which a backward pass begins."""


def denominators_of(comm: Communicator) -> Denominators:
    """What the losses of these ranks are divided by. The first call begins to watch their backward passes."""
    if comm not in _all:
        _all[comm] = Denominators(comm)
        if comm.size > 1:
            watch_backward(_all[comm])
    return _all[comm]


class Denominators:
    """What the losses of one communicator's ranks are divided by.

    Attributes:
        changed: whether this rank's losses since the last step are divided by other counts than the compared ones.
        in_pipeline: whether backward passes are a pipeline's, whose gradients do not call :meth:`reaches_model`.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = weakref.ref(comm)
        self._passes: list[Pass] = []
        self._agreed: list[Pass] | None = None
        self._flag_read = False
        self._asked = False
        self._steps = 0
        self._training: object = None
        self._trains = True
        self._reduced = False
        self._doubt: Difference | None = None
        self._said = False
        self._repeated = 0
        self.changed = self.in_pipeline = False

    def backward_begins(self, roots: Sequence[torch.Tensor], *, trains: bool, within: bool) -> None:
        """Read the losses of a backward pass that trains."""
        comm = self._comm()
        if not trains or comm is None or comm.size == 1:
            return
        weights = batch_weights(comm)
        losses = [(each, each.grad_fn) for each in roots if each.grad_fn is not None and each.numel() == 1]
        if not weights.in_use or not losses or not (losses[0][0].device.type == "cpu" or self._is_time):
            return
        found = [each for _, node in losses if node is not None for each in divisors(node)]
        if len(self._passes) >= _MOST_PASSES or self._training != (weights, weights.epochs_forgotten):
            self._passes.clear()  # left from an update that was refused, for example
            self._training = (weights, weights.epochs_forgotten)
        self._leave_out()
        self._passes.append(tuple(LossPart(weights.behind(node), divided, weights.totals) for divided, node in found))
        self._trains = self.in_pipeline
        self._compare_with_agreed()

    def reaches_model(self) -> None:
        """Note that the last backward pass makes gradients of a distributed model, reduced now or later."""
        self._trains = True

    def reduces(self) -> None:
        """Note that the gradients since the last step are reduced; otherwise each rank's step is its own."""
        self._reduced = True

    def _leave_out(self) -> None:
        """Drop the last backward pass if it made no gradient that is reduced: its model is this rank's own."""
        if self._passes and not self._trains:
            self._passes.pop()
            self._compare_with_agreed()
        self._trains = True

    def _compare_with_agreed(self) -> None:
        known = self._agreed or []
        self.changed = self._passes != known[: len(self._passes)]

    def fill_flag(self, flag: torch.Tensor) -> None:
        """Set the flag that is reduced with the gradients if this rank's losses changed."""
        if flag.device.type == "cpu":
            # By its data, because the version counter of the bucket has to count writes to gradients alone.
            flag.data.fill_(float(self.changed))

    def read_flag(self, flag: torch.Tensor) -> None:
        """Read the mean of the flag over the ranks."""
        if flag.device.type == "cpu":
            self._flag_read = True
            self._asked |= bool(flag > 0)

    @property
    def _is_time(self) -> bool:
        return self._steps < _FIRST_STEPS or self._steps % _EVERY == 0

    def step_begins(self, device: torch.device) -> None:
        """Compare with the other ranks, if the losses of one of them changed. Collective.

        Args:
            device: the device of the parameters that the step updates.

        Raises:
            HpctrainError: the ranks' losses are divided by different counts.
        """
        comm = self._comm()
        if comm is None or comm.size == 1:
            return
        self._leave_out()
        reduced, self._reduced = self._reduced, False
        if not reduced or turns_of(comm).joined:  # ranks without batches make no steps
            self._passes.clear()
            self._flag_read = self._asked = False
            return
        # FSDP2 reduces no flag with its gradients, and a flag on a GPU is not read.
        if not self._flag_read and (self._is_time or device.type == "cpu"):
            self._asked = bool(comm.allreduce(np.array([float(self.changed)]), "max")[0])
        self._steps += 1
        passes, asked = self._passes, self._asked
        self._passes, self._flag_read, self._asked, self.changed = [], False, False, False
        if asked:
            self._repeated = 0
            self._compare(comm, passes)
        elif passes:
            self._repeated += 1
            self._say_doubt(comm)

    def _say_doubt(self, comm: Communicator) -> None:
        """Warn once about a doubtful number that stays the same, which a count of a batch's contents would not."""
        if self._doubt is not None and self._repeated == _REPEATED and not self._said:
            self._said = True
            comm.say(f"{self._doubt.error.message}. If so, {self._doubt.error.hint}")

    def _compare(self, comm: Communicator, passes: list[Pass]) -> None:
        everyone = comm.allgather_object(passes)
        self._agreed = passes
        ranks = data_place(comm).ranks
        self._doubt = found = difference(everyone, ranks) if ranks > 1 else None
        if found is not None and found.certain:
            raise found.error


class Difference(NamedTuple):
    """What is wrong with the losses of all ranks, and what to write instead.

    Attributes:
        certain: False if the losses are right should some number in them count the rank's samples.
    """

    error: HpctrainError
    certain: bool = True


def difference(everyone: Sequence[Sequence[Pass]], ranks: int) -> Difference | None:
    """What is wrong with the losses of all ranks; None where their mean is right.

    Args:
        everyone: each rank's backward passes of one update.
        ranks: the number of ranks that compute different samples.
    """
    if len({len(each) for each in everyone}) > 1:
        return None
    doubt = None
    for passes in zip(*everyone, strict=True):
        if len({tuple(part.divided.kind for part in each) for each in passes}) > 1:
            continue
        scaled = any(_scaled_apart(parts) for parts in zip(*passes, strict=True))
        for parts in zip(*passes, strict=True):
            # A rank without a sample of its own computes another rank's.
            counted = {rank: each for rank, each in enumerate(parts) if each.weight > 0}
            if all(each.divided.is_off for each in counted.values()):
                continue
            alone = len(passes[0]) == 1
            summed = _sum_problem(counted, ranks, alone=alone, accumulated=len(everyone[0]))
            if summed is not None and summed.certain:
                return _too_small(summed, ranks)
            if uneven := _uneven(counted, scaled=scaled):
                return uneven
            doubt = doubt or (None if summed is None else _too_small(summed, ranks))
    return doubt


def _too_small(summed: DivisorProblem, ranks: int) -> Difference:
    unless = "" if summed.certain else " unless that number counts them too,"
    error = HpctrainError(
        "HT-loss-is-a-sum",
        "the loss is a sum over this rank's samples and {how}:{unless} the mean over {ranks} ranks is too small by a "
        "factor of {ranks}",
        _SUMMED,
        exit_code=1,
        how=summed.how,
        unless=unless,
        ranks=ranks,
    )
    return Difference(error, summed.certain)


def _scaled_apart(parts: Sequence[LossPart]) -> bool:
    """Whether ranks multiply their losses by different numbers that are not counts: each draws its own for mixup."""
    own = [each.divided for each in parts]
    alike = all(_close(own[0].divisor * each.bare, each.divisor * own[0].bare) for each in own)
    return not alike and any(each.is_scaled_by_chance for each in own)


def _sum_problem(parts: dict[int, LossPart], ranks: int, *, alone: bool, accumulated: int) -> DivisorProblem | None:
    """What is wrong with the divisor of a sum."""
    _, divided, samples = next(each for each in parts.values() if not each.divided.is_off)
    if not divided.is_sum or not (divided.exact or alone):
        return None
    return divisor_problem(divided, samples=samples, ranks=ranks, accumulated=accumulated)


def _uneven(parts: dict[int, LossPart], *, scaled: bool) -> Difference | None:
    ranks = list(parts)
    for other in ranks[1:]:
        pair = parts[ranks[0]], parts[other]
        own, theirs = (each.divided for each in pair)
        if _fit(*pair, own.divisor, theirs.divisor) or (scaled and _fit(*pair, own.bare, theirs.bare)):
            continue
        return Difference(
            HpctrainError(
                "HT-loss-different-counts",
                "the ranks divide their losses by different counts, not as their samples are divided: {kind} is "
                "{first:g} on rank {first_rank} and {other:g} on rank {other_rank}, so that the mean over the ranks is "
                "not the mean of the batch",
                _COUNTED,
                exit_code=1,
                kind=own.kind,
                first=own.divisor,
                first_rank=ranks[0],
                other=theirs.divisor,
                other_rank=other,
            )
        )
    return None


def _fit(one: LossPart, other: LossPart, own: float, theirs: float) -> bool:
    """Whether two ranks' divisors are those of a mean over the samples of both, or the same constant."""
    alike = _close(own, theirs) and (not one.divided.exact or one.weight == other.weight)
    return alike or _close(own * other.weight, theirs * one.weight)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=ROUNDING)

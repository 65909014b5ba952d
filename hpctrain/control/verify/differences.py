"""Compares the steps of ranks with those of one process, against what rounding errors make of them; the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.step_records import NAMELESS, Kept, RankFacts, StepRecord
from hpctrain.common.run.value_types import Count, Number, Text

RankSteps = tuple[RankFacts, list[StepRecord]]

# What rounding errors of the parameters make of a tensor is multiplied by this: ranks add up in another order at each
# operation, not once. Right scripts were seen to come to 7 at most, wrong ones of float32 to 10,000 and more.
_TIMES_NOISE = 30.0
# Where that is much, as in types of 16 bits, what rounding errors make has to be less than a true difference.
_TIMES_LARGE_NOISE, _LARGE = 3.0, 1e-3
# Sums whose terms cancel have rounding errors of their terms, wherever they come from: in units of the type's
# precision, and of the largest tensor of their kind.
_TIMES_PRECISION = 4.0
_PRECISIONS = {"float64": 2.0**-52, "float32": 2.0**-23, "tf32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_SAMPLES_TOLERANCE = 1e-4


def precision(name: str) -> float:
    """The distance of 1 to the next number of a floating type."""
    return _PRECISIONS.get(name, _PRECISIONS["float32"])


class TensorDifference(BaseModel):
    """A tensor that differs at a step.

    Attributes:
        step: counted from 1.
        rank: the one that has it.
        one_process, ranks: the element that differs most, or of a large tensor its norm.
        difference: the norm of the difference, relative to the tensor's.
        noise: what rounding errors make, likewise.
        factor: what the tensor was multiplied by, if it was.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    step: Count
    kind: Text
    name: Text
    shape: Annotated[tuple[Count, ...], Field(max_length=64)]
    rank: Count
    one_process: Number
    ranks: Number
    difference: Number
    noise: Number
    factor: Number


class Verdict(BaseModel):
    """What ``hpctrain verify`` found: the content of ``verify.json``, which is what ``--json`` prints.

    Attributes:
        equal: whether the ranks compute what one process computes.
        largest_difference, noise: those of the tensor that differs most, relative to it.
        first: the first tensor that differs.
        cause: why, most probably.
        notes: what was not seen, and what else there is to know.
        run: the directory of the ranks' run, which is not written.
    """

    model_config = ConfigDict(defer_build=True)

    equal: bool
    ranks: Count
    steps: Count
    largest_difference: Number
    noise: Number
    first: TensorDifference | None
    cause: Text
    notes: list[Text]
    run: Path = Field(Path(), exclude=True)


@dataclass(kw_only=True)
class Comparison:
    """What a comparison of all steps found.

    Attributes:
        steps: how many were compared.
        tensors: how many were compared, of all steps and ranks.
        different: all tensors that differ, in order.
        between: tensors that differ between ranks.
        largest, noise: the largest relative difference of any tensor, and the noise of that one.
        samples: at each step, whether the ranks together computed one process's samples: ``same``, ``other``, or
            ``unknown``.
        missing: tensors that only one process updates.
        not_finite: parameters of one process that hold no finite numbers, which are equal to anything alike.
    """

    steps: int = 0
    tensors: int = 0
    different: list[TensorDifference] = field(default_factory=list)
    between: list[TensorDifference] = field(default_factory=list)
    largest: float = 0.0
    noise: float = 0.0
    samples: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)


def compare(one: list[StepRecord], noisy: list[StepRecord], ranks: Sequence[list[StepRecord]]) -> Comparison:
    """Compare the ranks' steps with one process's.

    Args:
        noisy: those of one process whose parameters began with rounding errors.
        ranks: of each rank.
    """
    found = Comparison(steps=min([len(one), len(noisy), *(len(steps) for steps in ranks if steps)]))
    # Of each tensor the most until now: one step's may happen to be small, in types of 16 bits above all.
    most: dict[tuple[str, str], float] = {}
    for number in range(found.steps):
        step, other = one[number], noisy[number]
        present = {rank: steps[number] for rank, steps in enumerate(ranks) if len(steps) > number}
        _compare_step(found, number + 1, step, other, present, most)
    return found


def _compare_step(
    found: Comparison,
    number: int,
    one: StepRecord,
    noisy: StepRecord,
    ranks: dict[int, StepRecord],
    most: dict[tuple[str, str], float],
) -> None:
    kept = {each.key: each for each in one.kept if each.kind != "own"}
    noises = {each.key: each for each in noisy.kept}
    held = {rank: {each.key: each for each in step.kept} for rank, step in ranks.items()}
    largest = {
        kind: max((each.norm for each in kept.values() if each.kind == kind and math.isfinite(each.norm)), default=0.0)
        for kind in ("gradient", "parameter")
    }
    for key, tensor in kept.items():
        if tensor.kind == "parameter" and not math.isfinite(tensor.norm):
            found.not_finite.append(tensor.name)
        theirs = {rank: tensors[key] for rank, tensors in held.items() if key in tensors}
        if key[1].startswith(NAMELESS) and any(each.shape != tensor.shape for each in theirs.values()):
            continue  # Pieces of what models have, which is compared.
        found.tensors += len(theirs)
        if not theirs:
            # A gradient that no rank has shows in the parameter.
            if key[0] == "parameter" and key[1] not in found.missing:
                found.missing.append(key[1])
            continue
        noise = _noise(noises.get(key), tensor, most)
        allowed = _allowed(tensor, noise) + _TIMES_PRECISION * precision(tensor.dtype) * largest[key[0]]
        first = min(theirs)
        for rank, their in theirs.items():
            apart = _distance(their, tensor)
            relative = apart / tensor.norm if tensor.norm else float(apart > 0)
            if tensor.norm > _TIMES_PRECISION * precision(tensor.dtype) * largest[key[0]]:
                worst = max((found.largest, found.noise), (relative, noise / tensor.norm))
                found.largest, found.noise = worst
            differs = not apart <= allowed
            if differs:
                found.different.append(_difference(number, tensor, their, rank, relative, noise))
            between = _distance(their, theirs[first])
            if not between <= allowed and rank != first:
                found.between.append(_difference(number, theirs[first], their, rank, between, noise))
    found.samples.append(_samples(one.samples, [step.samples for step in ranks.values()]))


def _noise(noisy: Kept | None, tensor: Kept, most: dict[tuple[str, str], float]) -> float:
    """The norm of what rounding errors make of a tensor, now or at a step before."""
    noise = _distance(noisy, tensor)
    if not (0 < tensor.norm < math.inf and noise < math.inf):
        return noise
    most[tensor.key] = max(most.get(tensor.key, 0.0), noise / tensor.norm)
    return most[tensor.key] * tensor.norm


def _allowed(tensor: Kept, noise: float) -> float:
    """The norm of a difference that rounding errors may make, which alone make ``noise``."""
    few = min(_TIMES_NOISE * noise, _LARGE * tensor.norm)
    return max(few, _TIMES_LARGE_NOISE * noise)


def _distance(other: Kept | None, tensor: Kept) -> float:
    """The norm of a difference. Values that are not finite are equal to themselves."""
    if other is None or other.values.shape != tensor.values.shape:
        return math.inf
    with np.errstate(invalid="ignore", over="ignore"):
        apart = other.values - tensor.values
    apart[(other.values == tensor.values) | (np.isnan(other.values) & np.isnan(tensor.values))] = 0
    return float(np.linalg.norm(np.nan_to_num(apart, nan=math.inf)))


def _difference(number: int, tensor: Kept, their: Kept, rank: int, relative: float, noise: float) -> TensorDifference:
    one, have = tensor.norm, their.norm
    if tensor.whole and tensor.values.size and tensor.values.shape == their.values.shape:
        with np.errstate(invalid="ignore"):
            place = int(np.argmax(np.nan_to_num(np.abs(their.values - tensor.values), nan=math.inf)))
        one, have = float(tensor.values[place]), float(their.values[place])
    return TensorDifference(
        step=number,
        kind=tensor.kind,
        name=tensor.name,
        shape=tensor.shape,
        rank=rank,
        one_process=one,
        ranks=have,
        difference=relative,
        noise=noise / tensor.norm if tensor.norm else noise,
        factor=factor(tensor.values, their.values),
    )


def factor(one: NDArray[np.float64], other: NDArray[np.float64], *, tolerance: float = 1e-2) -> float | None:
    """What all elements were multiplied by; None where they changed in another way.

    Args:
        tolerance: the part of the result that may be something else.
    """
    square = float(one @ one) if one.shape == other.shape else 0.0
    if not 0 < square < math.inf or not np.isfinite(other).all():
        return None
    ratio = float(other @ one) / square
    rest = float(np.linalg.norm(other - ratio * one))
    return ratio if rest <= tolerance * float(np.linalg.norm(other)) else None


def _samples(one: NDArray[np.float64], ranks: Sequence[NDArray[np.float64]]) -> str:
    """How the ranks' samples are those of one process, whatever their order.

    Which ones there are counts, and not how often: what a script draws itself may be on every rank beside the rows of a
    batch, and a model may be called twice to see what it returns.
    """
    given = [each for each in ranks if len(each)]
    if not len(one) or not given:
        return "unknown"
    everyone = np.concatenate(given)
    return "same" if _among(everyone, one) and _among(one, everyone) else "other"


def _among(numbers: NDArray[np.float64], others: NDArray[np.float64]) -> bool:
    """Whether all numbers are among others, up to what models that feed each other may differ by."""
    bounds = np.concatenate([[-np.inf], np.sort(others), [np.inf]])
    places = np.searchsorted(bounds[1:-1], numbers)
    apart = np.minimum(numbers - bounds[places], bounds[places + 1] - numbers)
    return bool((apart <= _SAMPLES_TOLERANCE * np.abs(others).max()).all())


def as_means(steps: Sequence[list[StepRecord]], ranks: int) -> list[float] | None:
    """Whether the ranks' gradients are the means of what each of them computed, as DistributedDataParallel's are.

    Returns:
        At each step, what the mean was multiplied by before the optimizer got it, such as 1, or less by clipping; None
        where some gradient is no mean, or nothing is known of them.
    """
    factors: list[float] = []
    for number in range(min(map(len, steps), default=0)):
        held = [{each.key: each for each in rank[number].kept} for rank in steps]
        means, gradients = [], []
        for kind, name in held[0]:
            if kind == "gradient" and all(("own", name) in rank for rank in held):
                means.append(sum(rank["own", name].values for rank in held) / ranks)
                gradients.append(held[0][kind, name].values)
        if not means:
            return None
        common = factor(np.concatenate(means), np.concatenate(gradients), tolerance=1e-4)
        if common is None:
            return None
        factors.append(common)
    return factors or None


def read_verdict(directory: RunDirectory) -> Verdict | None:
    """The verdict on a run; None for a run that is none of ``hpctrain verify``.

    Raises:
        HpctrainError: the file holds something else.
    """
    return read_model(directory.verdict, Verdict) if directory.verdict.exists() else None


def lines_of(verdict: Verdict) -> Iterator[str]:
    """The lines of a verdict, on one screen."""
    ranks, steps = verdict.ranks, verdict.steps
    if verdict.equal and any(text.startswith("the script divides") for text in verdict.notes):
        yield f"equal: {ranks} ranks average what each of them computes, in {steps} steps"
    elif verdict.equal:
        largest, noise = _number(verdict.largest_difference), _number(verdict.noise)
        yield f"equal: {ranks} ranks compute what one process computes, in {steps} steps"
        yield f"  largest difference {largest} of a tensor; rounding errors alone make {noise}"
    else:
        yield f"different: {ranks} ranks do not compute what one process computes"
    if first := verdict.first:
        shape = "x".join(map(str, first.shape)) or "one number"
        yield f"  first at step {first.step}: {first.kind} of {first.name} ({shape}) on rank {first.rank}"
        ratio = f", {first.factor:.6g} times as large" if first.factor is not None else ""
        yield f"  one process {_number(first.one_process, '.9g')}, ranks {_number(first.ranks, '.9g')}{ratio}"
        yield f"  difference {_number(first.difference)} of the tensor; rounding errors make {_number(first.noise)}"
    if verdict.cause:
        yield f"  probably: {verdict.cause}"
    for note in verdict.notes:
        yield f"  {note}"


def _number(value: float | None, form: str = ".1e") -> str:
    return "no finite number" if value is None else format(value, form)

"""The verdict of ``hpctrain verify``: its file, and in words."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.control.verify.differences import Verdict


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

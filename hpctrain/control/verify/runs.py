"""Runs a work for some steps on one process and on N ranks, and judges what they computed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.common.cluster.machine import this_machine
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import Plan, Start
from hpctrain.common.run.request import TrainingRequest
from hpctrain.common.run.step_records import StepRecord, read_ranks
from hpctrain.common.settings import STALL, TIMEOUT, VERIFY, VERIFY_STEPS
from hpctrain.control.supervision.audience import Audience, Summary
from hpctrain.control.supervision.begin import begin_run
from hpctrain.control.supervision.failure import Failure
from hpctrain.control.supervision.interrupts import Interrupted, Interrupts
from hpctrain.control.verify.causes import as_ddp, cause
from hpctrain.control.verify.differences import Comparison, RankSteps, Verdict, compare, precision

# A rank that waits for another one is what a user wants to know within a minute or two.
_WAITS = {STALL.name: "20", TIMEOUT.name: "120"}
# More than rounding errors make, unless of 16 bits: probably the runs began with other numbers.
_MUCH_NOISE = 0.1


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a work is verified.

    Attributes:
        steps: of an optimizer.
        folder: where the runs' directories go.
        summarise: gives the content of a run's ``summary.json``.
    """

    steps: int
    folder: Path
    summarise: Callable[[RunDirectory, Plan, str], Summary]


class _Quiet:
    """Keeps why a run failed, and tells nobody anything else."""

    def __init__(self, summarise: Callable[[RunDirectory, Plan, str], Summary]) -> None:
        self._summarise = summarise
        self.failure: Failure | None = None
        self.interrupts = Interrupts()

    def _ignore(self, *news: Any, **named: Any) -> None:
        """Tell nobody."""

    notice = would_start = begun = ended = _ignore

    @contextlib.contextmanager
    def follow(self, plan: Plan, directory: RunDirectory, interrupts: Interrupts) -> Iterator[Audience]:
        self.interrupts = interrupts

        def failed(failure: Failure) -> None:
            self.failure = failure

        yield Audience(failed=failed)

    def summarise(self, directory: RunDirectory, plan: Plan, status: str) -> Summary:
        return self._summarise(directory, plan, status)


@dataclass(kw_only=True)
class _Ran:
    ranks: list[RankSteps]
    failure: Failure | None
    path: Path

    @property
    def steps(self) -> list[list[StepRecord]]:
        """The steps of each rank."""
        return [each for _, each in self.ranks]


def verify(request: TrainingRequest, options: Options, say: Callable[[str], None]) -> Verdict:
    """Run the work on one process and on the ranks of the request, and compare.

    Args:
        say: gets what is done now.

    Raises:
        HpctrainError: the request cannot be met, or the work fails before anything can be compared.
    """
    assert request.work is not None and request.ranks is not None
    if request.ranks == 1:
        raise HpctrainError("HT-ranks-too-few", "-np 1 is one process already", "compare it with more: -np 2")
    # What cannot be planned is told before anything runs.
    planned = replace(request, dry_run=True, run_dir=options.folder / "ranks")
    begin_run(planned, this_machine(), _Quiet(options.summarise))
    alone = _alone(request)
    say("one process")
    one = _run(alone, "one", options, None)
    _require_steps(one, "on one process")
    say(f"{request.ranks} ranks")
    ranks = _run(request, "ranks", options, None)
    if ranks.failure and not any(ranks.steps):
        _require_steps(ranks, f"on {request.ranks} ranks")
    low = one.ranks[0][0].low or "float32"
    say("one process with rounding errors")
    noisy = _run(alone, "noise", options, precision(low))
    if not any(noisy.steps):
        _require_steps(noisy, "on one process whose parameters begin with rounding errors")
    verdict = _judge(one, noisy, ranks)
    if verdict.equal and ranks.failure:
        _require_steps(ranks, f"on {request.ranks} ranks, which were equal to one process for {verdict.steps} steps")
    # Noise that is not finite is null in a verdict.
    if not verdict.equal or verdict.noise is None or verdict.noise > _MUCH_NOISE:
        say("one process again")
        twin = _run(alone, "again", options, None)
        _compare_twin(verdict, one, twin)
    return verdict


def _alone(request: TrainingRequest) -> TrainingRequest:
    """The same work on one process of the first host: the same batches, computed in the parts that ranks compute."""
    work = request.work
    assert work is not None and request.ranks is not None
    if isinstance(work, Recipe):
        data_ranks = work.mesh.at(request.ranks).data_ranks
        work = work.at(request.ranks)
        assert work.batch.size is not None
        if work.batch.micro_batch is None:
            work = work.computing(-(-work.batch.size // data_ranks))
    work = work.model_copy(update={"mesh": Mesh()})
    first = request.host_options.model_copy(update={"nodes": 1})
    return replace(request, work=work, ranks=1, backend=None, host_options=first)


def _run(request: TrainingRequest, name: str, options: Options, perturb: float | None) -> _Ran:
    """Run the work in a directory of its own. The script's own files go where it writes them."""
    settings = {"steps": options.steps, "perturb": perturb}
    environment = {
        **{key: value for key, value in _WAITS.items() if key not in os.environ},
        VERIFY.name: "1",
        VERIFY_STEPS.name: json.dumps(settings),
        **request.start.environment,
    }
    start = Start(**{**dict(request.start), "environment": environment})
    path = options.folder / name
    output = _Quiet(options.summarise)
    try:
        begin_run(replace(request, start=start, run_dir=path), this_machine(), output)
        output.interrupts.check()
    except Interrupted as interrupted:
        raise HpctrainError(
            "HT-verify-interrupted", "interrupted before it could compare", "verify again", exit_code=1
        ) from interrupted
    return _Ran(ranks=read_ranks(path, request.ranks or 1), failure=output.failure, path=path)


def _require_steps(ran: _Ran, where: str) -> None:
    """Raise what made a run fail, or that it made no step, before there was anything to compare."""
    if ran.failure:
        raise HpctrainError(
            "HT-verify-run-failed",
            "it fails {where}: {reason}",
            f"its files: {ran.path}",
            exit_code=1,
            where=where,
            reason=str(ran.failure),
        )
    if not any(ran.steps):
        raise HpctrainError(
            "HT-verify-nothing-compared",
            "it made no step of an optimizer {where}, so there is nothing to compare",
            f"verify what trains; its output: {ran.path / 'logs'}",
            exit_code=1,
            where=where,
        )


def _judge(one: _Ran, noisy: _Ran, ranks: _Ran) -> Verdict:
    first_rank = one.ranks[0]
    found = compare(first_rank[1], noisy.steps[0], ranks.steps)
    if not found.tensors and not found.missing:
        raise HpctrainError(
            "HT-verify-nothing-compared",
            "its optimizers hold no tensor that one process and the ranks have alike, so nothing was compared",
            "verify works with optimizers of torch and Keras",
            exit_code=1,
        )
    made = {len(steps) for steps in ranks.steps}
    ddp = as_ddp(found, ranks.ranks)
    fewer = len(made) > 1 and min(made) < len(first_rank[1])
    # Which is a difference even where they compute the same.
    alone = ranks.failure is not None and ranks.failure.code == "HT-ranks-trained-alone"
    wrong = found.different or found.between or found.missing or found.not_finite or fewer or alone
    equal = bool(ddp) or (found.steps > 0 and not wrong)
    verdict = Verdict(
        equal=equal,
        ranks=len(ranks.ranks),
        steps=found.steps,
        largest_difference=found.largest,
        noise=0.0 if ddp else found.noise,
        first=None,
        cause="",
        notes=[],
        run=ranks.path,
    )
    if ddp:
        verdict.notes.append(ddp)
    elif not equal:
        verdict.first = next(iter(found.different or found.between), None)
        verdict.cause = cause(found, first_rank, ranks.ranks)
    _note_limits(verdict, found, one, ranks)
    return verdict


def _note_limits(verdict: Verdict, found: Comparison, one: _Ran, ranks: _Ran) -> None:
    if ranks.failure and not verdict.equal:
        reason = ranks.failure.message.partition("\n")[0]
        if verdict.cause:
            verdict.notes.append(f"the run on ranks failed: {reason}")
        verdict.cause = verdict.cause or reason
    if found.missing:
        verdict.notes.append(f"updated by one process alone: {', '.join(found.missing[:3])}")
        verdict.cause = verdict.cause or "tensors that one process updates have no gradient on any rank"
    if not one.ranks[0][0].complete:
        verdict.notes.append(f"the work ended after {verdict.steps} steps")


def _compare_twin(verdict: Verdict, one: _Ran, twin: _Ran) -> None:
    """Say where one process does not compute the same twice, which nothing can be compared with."""
    found = compare(one.steps[0], one.steps[0], twin.steps)
    first = next(iter(found.different), None)
    if first and (verdict.first is None or first.step <= verdict.first.step):
        verdict.equal, verdict.first = False, first
        verdict.cause = (
            f"one process does not compute the same twice: {first.kind} {first.name} differs at step {first.step}. "
            "Give the script a seed for all that it draws (torch.manual_seed, numpy.random.seed, random.seed), and let "
            f"it go on from no checkpoint of its own where {VERIFY.name} is set"
        )

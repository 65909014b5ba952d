"""Carries out a request for a run: begins a run or a series of seeds, or resumes the one in its directory."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.common.cluster.machine import Machine, this_machine
from hpctrain.common.cluster.pod import in_pod, pod_index
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.directory import RunDirectory, default_directory, new_directory, read_model
from hpctrain.common.run.plan import HostOptions, Plan, Start, Stop
from hpctrain.common.run.request import TrainingRequest
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.control.resuming.attempts import job_id
from hpctrain.control.supervision.audience import Output
from hpctrain.control.supervision.interrupts import Interrupted, Interrupts
from hpctrain.control.supervision.one_run import begin_run, new_plan, ready, resume_run
from hpctrain.control.supervision.pods import take_part
from hpctrain.control.supervision.repeats import (
    Series,
    create_series,
    read_series,
    repeated,
    require_count,
    require_no_series,
)
from hpctrain.control.supervision.start import require_packages
from hpctrain.control.supervision.trackers import require_trackers


def begin_or_resume(request: TrainingRequest, output: Output, *, resume: bool) -> int:
    """Carry out a request; returns the exit code of ``hpctrain run``.

    Args:
        resume: resume the run or series in the request's directory, or begin it there if there is none.

    Raises:
        HpctrainError: the request cannot be met.
    """
    try:
        return _resume(request, output) if resume else _begin(request, output)
    except Interrupted as interrupted:
        output.notice(str(interrupted))
        comes_back = job_id() or in_pod() or (request.run_dir and _holds_a_run(RunDirectory(request.run_dir)))
        return RESUMABLE if comes_back else 1


def _begin(request: TrainingRequest, output: Output) -> int:
    if request.repeat is not None:
        return _begin_series(request, request.repeat, this_machine(), output)
    if request.run_dir:
        require_no_series(request.run_dir)
    return begin_run(request, this_machine(), output)


def _resume(request: TrainingRequest, output: Output) -> int:
    """Resume the run or series in the directory, or begin it."""
    if request.run_dir is None:
        raise HpctrainError(
            "HT-run-resume-without-directory", "--resume: which run?", "name its directory: --run-dir runs/…"
        )
    directory = RunDirectory(request.run_dir)
    if request.submitted and pod_index() and not request.dry_run:
        # The first pod has the say.
        return take_part(directory)
    if series := read_series(directory.path):
        require_count(series, request.repeat)
        return _resume_series(request, series, output)
    if request.submitted:
        submitted = read_model(request.submitted, Plan)
        if directory.plan.exists():
            request = _on_submitted_hosts(request, submitted, read_model(directory.plan, Plan))
        else:
            directory.create(submitted)
    if not directory.plan.exists():
        if request.work is None:
            raise HpctrainError(
                "HT-run-not-found",
                "{path} holds no run",
                "name its directory, or what to start there",
                path=directory.path,
            )
        return _begin(request, output)
    if request.repeat is not None:
        raise HpctrainError(
            "HT-run-not-series",
            "{path} holds one run",
            "--repeat needs a directory of its own: --run-dir DIR",
            path=directory.path,
        )
    return resume_run(request, directory, output)


def _on_submitted_hosts(request: TrainingRequest, submitted: Plan, begun: Plan) -> TrainingRequest:
    """The request to resume a run on the hosts of a later submission, whose pods have names of their own."""
    other = submitted.ranks != (begun.begun_ranks or begun.ranks)
    given = request.changes
    return replace(
        request,
        backend=request.backend or submitted.asked_backend,
        ranks=submitted.ranks if other else None,
        host_options=HostOptions(**{**dict(submitted.host_options), **given["host_options"]}),
        start=Start(**{**dict(submitted.start), **given["start"]}),
        stop=Stop(**{**dict(submitted.stop), **given["stop"]}),
    )


def _holds_a_run(directory: RunDirectory) -> bool:
    return directory.plan.exists() or read_series(directory.path) is not None


def _begin_series(request: TrainingRequest, count: int, machine: Machine, output: Output) -> int:
    """Begin a new series; returns the exit code.

    Raises:
        HpctrainError: the request cannot be met, or its directory cannot be used.
    """
    with Interrupts(request.stop.signal) as interrupts, interrupts.raised():
        # Each run gives the warnings itself, except in a dry run.
        plan, machine = new_plan(request, machine, output.notice if request.dry_run else lambda text: None)
        plans = repeated(plan, count)
        run = ready(plan, machine)
    path = request.run_dir or default_directory(plan.title)
    if request.dry_run:
        for seed, directory in Series(path=path, seeds=tuple(plans)).runs.items():
            output.would_start(replace(run, plan=plans[seed]), directory)
        return 0
    require_packages(plan)
    require_trackers(plan.trackers)
    series = create_series(path if request.run_dir else new_directory(path).path, plans)
    for seed, directory in series.runs.items():
        output.begun(plans[seed], directory)
    return _resume_series(request, series, output)


def _resume_series(request: TrainingRequest, series: Series, output: Output) -> int:
    """Run the seeds of a series that are not done; returns the exit code of the last run.

    Raises:
        HpctrainError: a run could not be carried out; the hint says how to resume all seeds.
    """

    def run_one(number: int, directory: RunDirectory) -> int:
        work = request.work
        if isinstance(work, Recipe):
            work = work.model_copy(update={"seed": work.seed + number})
        return resume_run(replace(request, work=work), directory, output)

    code = series.run(run_one, output.notice)
    if not request.dry_run:
        output.series_ended(series)
    return code

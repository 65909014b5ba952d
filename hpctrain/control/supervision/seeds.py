"""Begins or resumes the runs of one recipe with several seeds, one after the other."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.common.cluster.machine import Machine
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.directory import RunDirectory, default_directory, new_directory
from hpctrain.common.run.plan import Stop
from hpctrain.control.supervision.interrupts import Interrupts
from hpctrain.control.supervision.one_run import new_plan, ready, resume_run
from hpctrain.control.supervision.repeats import Series, create_series, repeated
from hpctrain.control.supervision.request import Output, RunRequest
from hpctrain.control.supervision.start import require_packages
from hpctrain.control.supervision.trackers import require_trackers


def begin_series(request: RunRequest, count: int, machine: Machine, output: Output) -> int:
    """Begin a new series; returns the exit code.

    Raises:
        HpctrainError: the request cannot be met, or its directory cannot be used.
    """
    with Interrupts(Stop(**request.stop).signal) as interrupts, interrupts.raised():
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
    return go_on_with_series(request, series, output)


def go_on_with_series(request: RunRequest, series: Series, output: Output) -> int:
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

"""Carries out a request for a run: begins a run, or resumes the one in its directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from hpctrain.common.checkpoints.layout import iterations
from hpctrain.common.cluster.gpus import SHARING_NOTE
from hpctrain.common.cluster.launcher import in_pod, pod_index
from hpctrain.common.cluster.machine import Machine, as_if_installed, this_machine
from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import require_trackers
from hpctrain.common.run.directory import RunDirectory, default_directory, new_directory, read_model, write_json
from hpctrain.common.run.plan import HostOptions, Plan, Start, Stop
from hpctrain.common.run.request import TrainingRequest
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.control.hosts.arrange import are_given, arrange
from hpctrain.control.planning.planner import make_plan, oversubscription, require_processors
from hpctrain.control.resuming.attempts import hold_run, job_id
from hpctrain.control.supervision.audience import Output, ReadyRun
from hpctrain.control.supervision.hosts_ready import ready_hosts
from hpctrain.control.supervision.interrupts import Interrupted, Interrupts
from hpctrain.control.supervision.pods import take_part
from hpctrain.control.supervision.start import available_launcher, require_packages, require_weights


def begin_or_resume(request: TrainingRequest, output: Output, *, resume: bool) -> int:
    """Carry out a request; returns the exit code of ``hpctrain run``.

    Args:
        resume: resume the run in the request's directory, or begin it there if there is none.

    Raises:
        HpctrainError: the request cannot be met.
    """
    try:
        return _resume(request, output) if resume else begin_run(request, this_machine(), output)
    except Interrupted as interrupted:
        output.notice(str(interrupted))
        comes_back = job_id() or in_pod() or (request.run_dir and RunDirectory(request.run_dir).plan.exists())
        return RESUMABLE if comes_back else 1


def _resume(request: TrainingRequest, output: Output) -> int:
    """Resume the run in the directory, or begin it."""
    if request.run_dir is None:
        raise HpctrainError(
            "HT-argument-missing",
            "--resume: which run?",
            "--run-dir last is the last one in hpctrain-runs/; `hpctrain status` lists them",
        )
    directory = RunDirectory(request.run_dir)
    if request.submitted and pod_index() and not request.dry_run:
        # The first pod has the say.
        return take_part(directory)
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
                "`hpctrain status` lists the runs in hpctrain-runs/; a recipe or a script is started there",
                path=directory.path,
            )
        return begin_run(request, this_machine(), output)
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


def begin_run(request: TrainingRequest, machine: Machine, output: Output) -> int:
    """Begin a new run; returns the exit code.

    Raises:
        HpctrainError: the request cannot be met, or its directory cannot be used.
    """
    if request.run_dir:
        _require_no_checkpoints(RunDirectory(request.run_dir))
    with Interrupts(request.stop.signal) as interrupts:
        with interrupts.raised():
            plan, machine = new_plan(request, machine, output.notice)
            run = ReadyRun(plan=plan, machine=machine, launcher=available_launcher(plan, machine))
        default = default_directory(run.plan.title)
        if request.dry_run:
            output.would_start(run, RunDirectory(request.run_dir or default))
            return 0
        require_packages(run.plan)
        require_trackers(run.plan.trackers)
        with interrupts.raised():
            run = _on_ready_hosts(run, request.run_dir or default, output)
        directory = RunDirectory(request.run_dir) if request.run_dir else new_directory(default)
        directory.create(run.plan)
        with hold_run(directory, notice=output.notice):
            return _execute(run, directory, interrupts, output)


def new_plan(request: TrainingRequest, machine: Machine, notice: Callable[[str], None]) -> tuple[Plan, Machine]:
    """The plan of a new run and the machine it is made for; ``notice`` gets warnings.

    Raises:
        HpctrainError: hosts or ranks that cannot be had, a backend that cannot run the work, or more ranks than cores.
    """
    assert request.work is not None
    arranged, warnings = arrange(request.host_options, machine.host, request.ranks, work=request.work)
    if request.dry_run and request.start.container is None:
        frameworks, missing = as_if_installed(machine.frameworks)
        machine = replace(machine, frameworks=frameworks)
        warnings += missing
    plan = make_plan(request, machine, arranged)
    _require_processors(plan, machine)
    require_weights(plan, machine)
    _warn(plan, machine, warnings, notice)
    return plan, machine


def resume_run(request: TrainingRequest, directory: RunDirectory, output: Output) -> int:
    """Resume the run of a directory; returns the exit code, which is 0 if it is already done.

    Raises:
        HpctrainError: it cannot be resumed, or another launcher runs it.
    """
    stop = read_model(directory.plan, Plan).stop.model_copy(update=request.changes["stop"])
    with Interrupts(stop.signal) as interrupts, contextlib.ExitStack() as held:
        with interrupts.raised():
            if not request.dry_run:
                held.enter_context(hold_run(directory, notice=output.notice))
        return _go_on(request, directory, interrupts, output)


def _go_on(request: TrainingRequest, directory: RunDirectory, interrupts: Interrupts, output: Output) -> int:
    # Imported here because only resuming needs it.
    from hpctrain.control.resuming.resume import resumption

    with interrupts.raised():
        further = resumption(directory, request)
        if further is None:
            return _is_done(directory, output)
        plan, machine = further.plan, further.machine
        # A number of ranks that the run already had was checked when it began.
        if request.ranks is not None:
            _require_processors(plan, machine)
        _warn(plan, machine, further.warnings, output.notice)
        launcher = available_launcher(plan, machine)
        run = ReadyRun(plan=plan, machine=machine, launcher=launcher, attempt=further.attempt)
    if request.dry_run:
        output.would_start(run, directory)
        return 0
    require_packages(run.plan)
    # A job that resumes unattended goes on even if its tracker cannot be reached.
    if request.tracking is not None:
        require_trackers(request.tracking)
    with interrupts.raised():
        run = _on_ready_hosts(run, directory.path, output)
    replace(further, plan=run.plan).begin(directory)
    return _execute(run, directory, interrupts, output)


def _on_ready_hosts(run: ReadyRun, folder: Path, output: Output) -> ReadyRun:
    """The run on hosts that were asked, if there are others than this machine."""
    try:
        return replace(run, plan=ready_hosts(run.plan, run.launcher, folder, notice=output.notice))
    except HpctrainError as error:
        if run.attempt.number > 1 and error.exit_code == 1:
            # The hosts took part before, so they may come back.
            raise error.but(exit_code=RESUMABLE) from error
        raise


def _is_done(directory: RunDirectory, output: Output) -> int:
    # The launcher can have died between the last event and the summary.
    if not directory.summary.exists():
        write_json(directory.summary, output.summarise(directory, read_model(directory.plan, Plan), "done"))
    output.notice(f"{directory.path} is done")
    return 0


def _execute(run: ReadyRun, directory: RunDirectory, interrupts: Interrupts, output: Output) -> int:
    # Imported here because they take 20 ms, which a dry run does not need.
    from hpctrain.common.run.records import holding
    from hpctrain.control.supervision.execution import Execution

    with holding(directory), output.follow(run.plan, directory, interrupts) as audience:
        execution = Execution(directory=directory, interrupts=interrupts, audience=audience, summarise=output.summarise)
        failure, summary = execution.run(run)
    output.ended(run.plan, directory, failure, summary)
    return failure.exit_code if failure else 0


def _require_no_checkpoints(directory: RunDirectory) -> None:
    """Refuse a directory with the checkpoints of a run whose plan is lost: they would be taken for the new run's."""
    # Unlike pathlib's, this accepts any name; a bad one is reported when the directory is made.
    there = os.path.isdir(directory.checkpoints)  # noqa: PTH112
    if there and not directory.plan.exists() and iterations(directory.checkpoints):
        raise HpctrainError(
            "HT-run-plan-missing",
            "{path} holds checkpoints, but no plan.json that says of which run",
            "restore that file, or choose another place with --run-dir",
            path=directory.path,
        )


def _require_processors(plan: Plan, machine: Machine) -> None:
    if not plan.start.oversubscribe and not are_given(plan.host_options):
        require_processors(plan, machine)


def _warn(plan: Plan, machine: Machine, warnings: Iterable[str], notice: Callable[[str], None]) -> None:
    for warning in filter(None, (*warnings, oversubscription(plan, machine), SHARING_NOTE * plan.start.share_gpus)):
        notice(f"warning: {warning}")
    if plan.micro_batch_reason:
        notice(f"batch.micro_batch: {plan.micro_batch_reason}")

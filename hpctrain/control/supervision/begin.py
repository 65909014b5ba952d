"""Carries out a request for a run: begins a run or a series of seeds, or resumes the one in its directory."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.common.cluster.machine import this_machine
from hpctrain.common.cluster.pod import in_pod, pod_index
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.control.resuming.attempts import job_id
from hpctrain.control.supervision.interrupts import Interrupted
from hpctrain.control.supervision.one_run import begin_run, resume_run
from hpctrain.control.supervision.pods import take_part
from hpctrain.control.supervision.repeats import read_series, require_count, require_no_series
from hpctrain.control.supervision.request import Output, RunRequest
from hpctrain.control.supervision.seeds import begin_series, go_on_with_series


def begin_or_resume(request: RunRequest, output: Output, *, resume: bool) -> int:
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


def _begin(request: RunRequest, output: Output) -> int:
    if request.repeat is not None:
        return begin_series(request, request.repeat, this_machine(), output)
    if request.run_dir:
        require_no_series(request.run_dir)
    return begin_run(request, this_machine(), output)


def _resume(request: RunRequest, output: Output) -> int:
    """Resume the run or series in the directory, or begin it."""
    if request.run_dir is None:
        raise HpctrainError("--resume: which run?", "name its directory: --run-dir runs/…")
    directory = RunDirectory(request.run_dir)
    if request.submitted and pod_index() and not request.dry_run:
        # The first pod has the say.
        return take_part(directory)
    if series := read_series(directory.path):
        require_count(series, request.repeat)
        return go_on_with_series(request, series, output)
    if request.submitted:
        submitted = read_model(request.submitted, Plan)
        if directory.plan.exists():
            request = _on_submitted_hosts(request, submitted, read_model(directory.plan, Plan))
        else:
            directory.create(submitted)
    if not directory.plan.exists():
        if request.work is None:
            raise HpctrainError(f"{directory.path} holds no run", "name its directory, or what to start there")
        return _begin(request, output)
    if request.repeat is not None:
        raise HpctrainError(f"{directory.path} holds one run", "--repeat needs a directory of its own: --run-dir DIR")
    return resume_run(request, directory, output)


def _on_submitted_hosts(request: RunRequest, submitted: Plan, begun: Plan) -> RunRequest:
    """The request to resume a run on the hosts of a later submission, whose pods have names of their own."""
    other = submitted.ranks != (begun.begun_ranks or begun.ranks)
    return replace(
        request,
        backend=request.backend or submitted.asked_backend,
        ranks=submitted.ranks if other else None,
        host_options={**dict(submitted.host_options), **request.host_options},
        start={**dict(submitted.start), **request.start},
        stop={**dict(submitted.stop), **request.stop},
    )


def _holds_a_run(directory: RunDirectory) -> bool:
    return directory.plan.exists() or read_series(directory.path) is not None

"""``hpctrain submit``."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.batch.preparation import container_options, find_cluster, host_options, prepare
from hpctrain.batch.request import JobRequest, job_request
from hpctrain.batch.submission import Job, check
from hpctrain.batch.submission import submit as submit_job
from hpctrain.cli import completion
from hpctrain.cli.forecast import prediction_records, print_forecast
from hpctrain.cli.host_options import JobHosts
from hpctrain.cli.option_groups import with_groups
from hpctrain.cli.predicted_gpu import PredictedGpu, require_gpu
from hpctrain.cli.run_options import JobStart, Restarts, WorkOptions
from hpctrain.cli.submit_options import Cluster, JobOptions, ListClusters, ScriptOptions
from hpctrain.cli.work import read_tasks
from hpctrain.run.directory import RunDirectory, default_directory
from hpctrain.run.plan import Start
from hpctrain.run.resuming import resume_command

# As shells have it for Ctrl-C.
_INTERRUPTED = 130


@with_groups
def submit(
    work: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|SCRIPT.py", help="A recipe's name or file, or a script.", autocompletion=completion.recipes
        ),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="For the script.")] = None,
    cluster: Cluster = "auto",
    *,
    job: JobOptions,
    training: WorkOptions,
    start: JobStart,
    hosts: JobHosts,
    restarts: Restarts = None,
    script: ScriptOptions,
    list_clusters: ListClusters = False,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the run's files go; by default runs/NAME-TIME.")
    ] = None,
    gpu: PredictedGpu = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print script, placement and environment; submit and write nothing.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end, and exit as it does.")] = False,
) -> None:
    """Submit a training to Slurm, or to Kubernetes where the profile is of it. Its jobs go on until it is done.

    Prints the run directory and the numbers of its jobs.
    """
    require_gpu(gpu)
    if run_dir:
        # Without a directory of one's own there is no need for all that runs a series.
        from hpctrain.supervision.repeats import require_no_series

        require_no_series(run_dir)
    found = find_cluster(cluster, job.partition)
    request = job_request(found.profile, Path(work).stem, job.asked())
    if found.profile.kubernetes:
        from hpctrain.cli.submit_pods import PodSubmission, submit_pods

        submission = PodSubmission(
            profile=found.profile,
            request=request,
            work=work,
            arguments=arguments or [],
            training=training,
            asked=job.asked(),
            run_dir=run_dir,
            restarts=restarts,
            gpu=gpu,
        )
        submit_pods(submission, start, hosts, script, dry_run=dry_run, wait=wait)
        return
    # The command line goes before the profile.
    in_container = container_options(found.profile, start.container, start.container_runtime, start.mounts or [])
    start = replace(start, launcher=start.launcher or found.profile.launcher, **in_container)
    changes = start.changes()
    works = read_tasks(
        work, training.overrides or [], arguments or [], request.tasks, mesh=training.mesh, small=training.small
    )
    works = {task: training.tracked(each) for task, each in works.items()}
    made = prepare(
        found,
        request,
        works,
        framework=training.framework,
        backend=training.backend or "auto",
        hosts=host_options(found.profile, hosts.fabric, hosts.node, hosts.interface),
        start=Start(**changes),
        restarts=restarts,
        stage=script.stage or [],
        stage_environment=script.stage_environment,
        template=script.template,
        look_only=dry_run,
    )
    for line in made.notices:
        typer.echo(line, err=True)
    path = (run_dir or default_directory(made.plan.title)).absolute()
    if dry_run:
        _show(made, path)
        print_forecast(made, next(iter(works.values())), gpu)
        return
    made = replace(made, predictions=prediction_records(made, works, gpu))
    directory, jobs = submit_job(made, path, numbered=run_dir is None)
    typer.echo(directory.path)
    typer.echo(" ".join(jobs))
    if wait:
        raise typer.Exit(_wait(directory, request))


def _show(job: Job, path: Path) -> None:
    # Rendering placements takes time that a submission does not need.
    from hpctrain.batch.preview import preview

    script = job.script(path)
    typer.echo(preview(job, script), nl=False)
    if said := check(script):
        typer.echo(said, err=True)


def _wait(directory: RunDirectory, request: JobRequest) -> int:
    from hpctrain.batch import waiting
    from hpctrain.report.console import Console
    from hpctrain.supervision.follow import Follower

    runs = [RunDirectory(directory.path / f"task-{task}") for task in request.tasks] or [directory]
    try:
        with Console() as console:
            follower = None if request.tasks else Follower(directory, console.show, console.line)
            waiting.wait(directory, follower, lambda text: typer.echo(text, err=True))
    except KeyboardInterrupt:
        place = shlex.quote(str(directory.path))
        typer.echo(f"the job goes on. See how it is: hpctrain status {place}", err=True)
        typer.echo(f"  follow it: hpctrain logs -f {place}; end it: hpctrain cancel {place}", err=True)
        return _INTERRUPTED
    code = waiting.exit_code(runs)
    if code:
        typer.echo(f"hpctrain: not finished; what the jobs printed is in {directory.logs}", err=True)
        typer.echo(f"  to go on: {resume_command(directory)}", err=True)
    return code

"""``hpctrain submit``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli import completion
from hpctrain.cli.host_options import JobHosts
from hpctrain.cli.jobs import send_job, show_job
from hpctrain.cli.option_groups import with_groups
from hpctrain.cli.run_options import JobStart, Repeat, Restarts, WorkOptions
from hpctrain.cli.submit_options import Cluster, JobOptions, ListClusters, ScriptOptions
from hpctrain.cli.work import read_tasks, require_work
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.printable import shell_word
from hpctrain.common.run.directory import default_directory
from hpctrain.common.run.plan import Start, Stop
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.schedulers.preparation import container_options, find_cluster, host_options, prepare, requested
from hpctrain.control.schedulers.request import require_options
from hpctrain.report.output import tell


@with_groups
def submit(
    work: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|SCRIPT.py", help="A recipe's name or file, or a script.", autocompletion=completion.recipes
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="Arguments of the script.")
    ] = None,
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
        Path | None, typer.Option(metavar="DIR", help="Where the run's files go; by default hpctrain-runs/NAME-TIME.")
    ] = None,
    repeat: Repeat = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print script, placement and environment; submit and write nothing.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end, and exit as it does.")] = False,
) -> None:
    """Submit a training run to Slurm, or to Kubernetes if the profile is for it. Its jobs continue until it is done.

    Prints the run directory and the job IDs.
    """
    if run_dir:
        # Imported only for a directory that was named, because it loads all that runs a series.
        from hpctrain.control.supervision.repeats import require_no_series

        require_no_series(run_dir)
    require_work(work)
    asked = job.asked()
    if repeat is not None:
        if job.array is not None:
            raise HpctrainError(
                "HT-array-and-repeat",
                "--array and --repeat exclude each other: --repeat makes an array of its own",
                f"--array with --set seed=%a chooses the seeds; hpctrain submit {shell_word(work)} --repeat {repeat}",
            )
        asked["array"] = f"0-{repeat - 1}"
    require_options(asked)
    found = find_cluster(cluster, job.partition)
    request = requested(found, Path(work).stem, asked)
    if found.profile.kubernetes:
        from hpctrain.cli.submit_pods import PodSubmission, submit_pods

        submission = PodSubmission(
            profile=found.profile,
            request=request,
            work=work,
            arguments=arguments or [],
            training=training,
            asked={**job.asked(), "repeat": repeat},
            run_dir=run_dir,
            restarts=restarts,
        )
        submit_pods(submission, start, hosts, script, dry_run=dry_run, wait=wait)
        return
    # The command line takes precedence over the profile.
    in_container = container_options(found.profile, start.container, start.container_runtime, start.mounts or [])
    start = replace(start, launcher=start.launcher or found.profile.launcher, **in_container)
    works = read_tasks(work, training, arguments or [], request.tasks, repeat=repeat is not None)
    training_request = TrainingRequest(
        work=None,
        backend=training.backend,
        framework=training.framework,
        host_options=host_options(found.profile, hosts.fabric, hosts.node, hosts.interface, hosts.topology),
        start=Start(**start.changes()),
        stop=Stop(restarts=restarts),
        dry_run=dry_run,
    )
    trainings = {task: replace(training_request, work=each) for task, each in works.items()}
    made = prepare(found, request, trainings, script.content())
    for line in made.notices:
        tell(line)
    path = (run_dir or default_directory(made.plan.title)).absolute()
    if dry_run:
        show_job(made, path)
        return
    if made.pack:
        made.pack.write(tell)
    send_job(made, path, numbered=run_dir is None, wait=wait, repeated=repeat is not None)

"""``hpctrain submit``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.batch.preparation import container_options, find_cluster, host_options, prepare
from hpctrain.batch.request import JobRequest, further_options, job_request
from hpctrain.batch.submission import Job, check
from hpctrain.batch.submission import submit as submit_job
from hpctrain.cli import completion
from hpctrain.cli import submit_options as options
from hpctrain.cli.host_options import FabricFile, Interface, NodeFile
from hpctrain.cli.start_options import (
    Backend,
    ContainerRuntime,
    Environment,
    Image,
    LauncherName,
    Mounts,
    Restarts,
    Smoke,
    start_changes,
)
from hpctrain.cli.work import default_directory, read_tasks
from hpctrain.planning.machine import as_if_installed, this_machine
from hpctrain.run.directory import RunDirectory
from hpctrain.run.plan import Start
from hpctrain.run.resuming import resume_command
from hpctrain.supervision.repeats import require_no_series

# As shells have it for Ctrl-C.
_INTERRUPTED = 130


def submit(
    work: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|SCRIPT.py", help="A recipe's name or file, or a script.", autocompletion=completion.recipes
        ),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="For the script.")] = None,
    cluster: options.Cluster = "auto",
    nodes: options.Nodes = None,
    gpus_per_node: options.GpusPerNode = None,
    tasks_per_node: options.TasksPerNode = None,
    cpus_per_task: options.CpusPerTask = None,
    time: options.Time = None,
    partition: options.Partition = None,
    account: options.Account = None,
    qos: options.Qos = None,
    constraint: options.Constraint = None,
    job_name: options.JobName = None,
    array: options.Array = None,
    dependency: options.Dependency = None,
    chain: options.Chain = None,
    further: options.Further = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the recipe; repeatable.")
    ] = None,
    small: Smoke = False,
    framework: Annotated[str | None, typer.Option(help="torch or keras; for a recipe.")] = None,
    backend: Backend = None,
    launcher: LauncherName = None,
    environment: Environment = None,
    container: Image = None,
    container_runtime: ContainerRuntime = None,
    mounts: Mounts = None,
    fabric: FabricFile = None,
    node: NodeFile = None,
    interface: Interface = None,
    restarts: Restarts = None,
    stage: options.Stage = None,
    stage_environment: options.StageEnvironment = None,
    template: options.Template = None,
    list_variables: options.ListVariables = False,
    list_clusters: options.ListClusters = False,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the run's files go; by default runs/NAME-TIME.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print script, placement and environment; submit and write nothing.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end, and exit as it does.")] = False,
) -> None:
    """Submit a training to Slurm. Its jobs requeue themselves, and go on, until it is done.

    Prints the run directory and the numbers of its jobs.
    """
    if run_dir:
        require_no_series(run_dir)
    found = find_cluster(cluster, partition)
    asked = {
        "name": job_name,
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "tasks_per_node": tasks_per_node,
        "cpus_per_task": cpus_per_task,
        "time": time,
        "partition": partition,
        "account": account,
        "qos": qos,
        "constraint": constraint,
        "array": array,
        "dependency": dependency,
        "chain": chain,
        "sbatch": further_options(further or []),
    }
    request = job_request(found.profile, Path(work).stem, asked)
    changes = start_changes(
        launcher=launcher or found.profile.launcher,
        python=None,
        environment=environment or None,
        ssh_port=None,
        arguments=None,
        **container_options(found.profile, container, container_runtime, mounts or []),
    )
    start = Start(**changes)
    missing: tuple[str, ...] = ()
    machine = this_machine()
    if dry_run and start.container is None:
        machine, missing = as_if_installed(machine)
    job = prepare(
        found,
        request,
        read_tasks(work, overrides or [], arguments or [], request.tasks, small=small),
        machine,
        framework=framework,
        backend=backend or "auto",
        hosts=host_options(found.profile, fabric, node, interface),
        start=start,
        restarts=restarts,
        stage=stage or [],
        stage_environment=stage_environment,
        template=template,
    )
    warnings = [f"warning: {each}" for each in missing]
    for line in (*found.findings, *([request.warning] if request.warning else []), *warnings):
        typer.echo(line, err=True)
    path = (run_dir or default_directory(job.plan.title)).absolute()
    if dry_run:
        _show(job, path)
        return
    directory, jobs = submit_job(job, path, numbered=run_dir is None)
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

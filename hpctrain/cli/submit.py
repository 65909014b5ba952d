"""``hpctrain submit``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.batch.request import JobRequest, further_options, job_request
from hpctrain.batch.script import render, variables
from hpctrain.batch.staging import Staging, plan_staging
from hpctrain.batch.submission import Job, check, command_to_submit, free_directory, require_log_path
from hpctrain.batch.submission import submit as submit_job
from hpctrain.cli import submit_options as options
from hpctrain.cli.host_options import FabricFile, Interface, NodeFile
from hpctrain.cli.start_options import ContainerRuntime, Environment, Image, LauncherName, Mounts, start_changes
from hpctrain.cli.work import default_directory, read_work
from hpctrain.cluster.container import Container
from hpctrain.cluster.profile import ClusterProfile
from hpctrain.cluster.profiles import load_profile
from hpctrain.errors import HpctrainError
from hpctrain.plan import HostOptions, Plan, Start, Stop
from hpctrain.planning.machine import this_machine
from hpctrain.planning.planner import unplaced_plan
from hpctrain.rundir import RunDirectory

# Of the time between the signal and the limit; the rest is for leaving and the requeue.
_STOP_SHARE = 0.8
# As shells have it for Ctrl-C.
_INTERRUPTED = 130


def submit(
    work: Annotated[str, typer.Argument(metavar="RECIPE|SCRIPT.py", help="A recipe's name or file, or a script.")],
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
    framework: Annotated[str | None, typer.Option(help="torch or keras; for a recipe.")] = None,
    backend: Annotated[str, typer.Option(help="What reduces gradients: auto, horovod or single.")] = "auto",
    launcher: LauncherName = None,
    environment: Environment = None,
    container: Image = None,
    container_runtime: ContainerRuntime = None,
    mounts: Mounts = None,
    fabric: FabricFile = None,
    node: NodeFile = None,
    interface: Interface = None,
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
    profile, findings, files = _profile(cluster, partition)
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
    request = job_request(profile, Path(work).stem, asked)
    start = _start(profile, launcher, environment, container, container_runtime, mounts or [])
    staging = _staging(profile, stage or [], stage_environment, start.container)
    hosts = _host_options(profile, fabric, node, interface)
    plans = _plans(
        (work, overrides or [], arguments or []),
        request,
        framework=framework,
        backend=backend,
        hosts=hosts,
        start=start,
    )
    first = next(iter(plans.values()))
    directory = (run_dir or free_directory(default_directory(first.title))).absolute()
    require_log_path(directory)
    values = variables(
        request,
        profile,
        run_directory=directory,
        folder=Path.cwd(),
        container=start.container,
        staging=staging,
        virtual_environment=_virtual_environment(),
    )
    script = render(values, template)
    for line in findings:
        typer.echo(line, err=True)
    if dry_run:
        # Rendering placements takes time that a submission does not need.
        from hpctrain.cli.submission_preview import preview

        typer.echo(preview(script, first, request), nl=False)
        if said := check(script):
            typer.echo(said, err=True)
        return
    job = Job(cluster=profile.name, request=request, plans=plans, script=script, files=files)
    jobs = submit_job(job, RunDirectory(directory))
    typer.echo(directory)
    typer.echo(" ".join(jobs))
    if wait:
        raise typer.Exit(_wait(RunDirectory(directory), request))


def _profile(cluster: str, partition: str | None) -> tuple[ClusterProfile, tuple[str, ...], dict[str, str]]:
    """The profile, what was found where it is discovered, and files for the run directory."""
    if cluster != "auto":
        return load_profile(cluster), (), {}
    from hpctrain.batch.discover import discover, profile_yaml

    found = discover(partition)
    return found.profile, found.findings, {"cluster.yaml": profile_yaml(found.profile)}


def _start(
    profile: ClusterProfile,
    launcher: str | None,
    environment: Sequence[str] | None,
    image: str | None,
    runtime: str | None,
    mounts: Sequence[str],
) -> Start:
    """How the ranks are started: as the command line says, else as the profile does."""
    given = profile.container
    image = image if image is not None or given is None else given.image
    if image is not None and Path(image).exists():
        # It must mean the same in the job.
        image = str(Path(image).absolute())
    changes = start_changes(
        launcher=launcher or profile.launcher,
        python=None,
        image=image,
        runtime=runtime or (given.runtime if given else None),
        mounts=[*(given.mounts if given else ()), *mounts] or None,
        environment=environment or None,
        ssh_port=None,
        arguments=None,
    )
    start = Start(**changes)
    if start.container and start.container.runtime == "pyxis" and start.launcher == "mpirun":
        raise HpctrainError("pyxis is a plugin of srun: mpirun cannot start its containers", "--launcher srun-pmix")
    return start


def _staging(
    profile: ClusterProfile, sources: Sequence[Path], environment: Path | None, container: Container | None
) -> Staging | None:
    staging = plan_staging(profile, sources, environment)
    if container and staging and (staging.environment or container.runtime == "pyxis"):
        raise HpctrainError(
            "--stage and --container exclude each other here: what is staged would not be in the container",
            "mount the source itself with --mount; an environment belongs into the image",
        )
    return staging


def _host_options(profile: ClusterProfile, fabric: Path | None, node: str | None, interface: str | None) -> HostOptions:
    """Files by absolute paths: they are read in the job."""
    given = fabric or (Path(profile.fabric) if profile.fabric else None)
    places = node or profile.node_map
    return HostOptions(
        fabric=given.absolute() if given else None,
        node=str(Path(places).absolute()) if places and places != "live" else places,
        interface=interface or profile.interface,
    )


def _plans(
    given: tuple[str, Sequence[str], Sequence[str]],
    request: JobRequest,
    *,
    framework: str | None,
    backend: str,
    hosts: HostOptions,
    start: Start,
) -> dict[int | None, Plan]:
    """The plan of each task of an array, or of the one run, under None."""
    work, overrides, arguments = given
    if request.tasks and not work.endswith(".py") and not any("%a" in override for override in overrides):
        raise HpctrainError(
            f"--array {request.array}: every task would do the same training",
            "%a is the task's number: --set seed=%a, for example",
        )
    stop = Stop(signal=request.signal, seconds=request.signal_seconds * _STOP_SHARE)
    machine = this_machine()
    plans: dict[int | None, Plan] = {}
    for task in request.tasks or (None,):
        number = "%a" if task is None else str(task)
        chosen = read_work(
            work, [each.replace("%a", number) for each in overrides], [each.replace("%a", number) for each in arguments]
        )
        plans[task] = unplaced_plan(
            chosen,
            machine,
            ranks=request.ranks,
            backend=backend,
            framework=framework,
            host_options=hosts,
            start=start,
            stop=stop,
        )
    return plans


def _virtual_environment() -> Path | None:
    """The one that this hpctrain is in."""
    here = Path(sys.prefix)
    return here if sys.prefix != sys.base_prefix and (here / "bin" / "activate").exists() else None


def _wait(directory: RunDirectory, request: JobRequest) -> int:
    from hpctrain.batch import waiting
    from hpctrain.launch.follow import Follower
    from hpctrain.report.console import Console

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
        typer.echo(f"  to go on: {command_to_submit(directory.path)}", err=True)
    return code

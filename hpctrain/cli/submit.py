"""``hpctrain submit``, and ``hpctrain job``, which job scripts call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from hpctrain.cli.options import (
    Arguments,
    FabricFile,
    Interface,
    NodeFile,
    with_groups,
)
from hpctrain.cli.training_options import JobStart, Restarts, WorkOptions
from hpctrain.cli.work import read_work, require_work
from hpctrain.common.files.printable import shell_word
from hpctrain.common.run.directory import RunDirectory, read_model, resume_command
from hpctrain.common.run.plan import Plan, Start, Stop
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.schedulers.job_request import (
    container_options,
    further_options,
    host_options,
    job_request,
)
from hpctrain.control.schedulers.run_jobs import exit_code, last_words, may_go_on, summary_status, wait_for_end
from hpctrain.control.schedulers.scheduler import Order, find_cluster, scheduler
from hpctrain.report.output import answer, tell

# The exit status that shells give to a command that Ctrl-C ended.
_INTERRUPTED = 130


Cluster = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE|auto",
        help="A cluster profile, of those in slurm/README.md; auto discovers the cluster at hand.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Requests to Slurm; None leaves a value to the profile."""

    panel: ClassVar[str] = "What is requested from Slurm"

    nodes: Annotated[int | None, typer.Option(metavar="N", help="Nodes; by default 1.")] = None
    spare: Annotated[
        int | None, typer.Option(metavar="N", help="Further nodes, for those that fail --check; they stay idle.")
    ] = None
    gpus_per_node: Annotated[int | None, typer.Option(metavar="G", help="GPUs of each node; by default all.")] = None
    tasks_per_node: Annotated[
        int | None, typer.Option(metavar="T", help="Ranks on each node; by default one per GPU.")
    ] = None
    cpus_per_task: Annotated[
        int | None, typer.Option(metavar="C", help="CPUs of each rank; by default its share of the cores.")
    ] = None
    time: Annotated[str | None, typer.Option(metavar="[D-]H:M:S", help="Time limit of a job.")] = None
    partition: Annotated[str | None, typer.Option("--partition", "-p")] = None
    account: Annotated[str | None, typer.Option()] = None
    qos: Annotated[str | None, typer.Option()] = None
    constraint: Annotated[str | None, typer.Option(help="Features that the nodes must have.")] = None
    job_name: Annotated[str | None, typer.Option(help="Name of the job; by default the recipe's or script's.")] = None
    dependency: Annotated[str | None, typer.Option(metavar="afterok:ID")] = None
    further: Annotated[
        list[str] | None, typer.Option("--sbatch", metavar="KEY=VALUE", help="Other options of sbatch; repeatable.")
    ] = None

    def asked(self) -> dict[str, Any]:
        """The fields of :class:`~hpctrain.control.schedulers.job_request.JobRequest`; None for an option not given."""
        options = dict(vars(self))
        return {"name": options.pop("job_name"), "sbatch": further_options(options.pop("further") or []), **options}


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """The options about the job script."""

    panel: ClassVar[str] = "The job script"

    check: Annotated[
        bool, typer.Option("--check", help="Check every node first, on the job's nodes, as `hpctrain doctor` does.")
    ] = False
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Verify for a few steps first, on the job's nodes; a job whose ranks differ from one process ends.",
        ),
    ] = False
    no_copy: Annotated[
        bool, typer.Option("--no-copy", help="Run the script where it is, instead of a copy of its code as it is now.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class JobHosts:
    """What is known of a job's hosts before it starts."""

    fabric: FabricFile = None
    node: NodeFile = None
    interface: Interface = None


@with_groups
def submit(
    work: Annotated[
        str,
        typer.Argument(metavar="RECIPE|SCRIPT.py", help="A recipe's name or file, or a script."),
    ],
    arguments: Arguments = None,
    cluster: Cluster = "auto",
    *,
    job: JobOptions,
    training: WorkOptions,
    start: JobStart,
    hosts: JobHosts,
    restarts: Restarts = None,
    script: ScriptOptions,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the run's files go; by default hpctrain-runs/NAME-TIME.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job script; submit and write nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end, and exit as it does.")] = False,
) -> None:
    """Submit a training run to Slurm, or to Kubernetes if the profile is for it. Its jobs continue until it is done.

    Prints the run directory and the job IDs.
    """
    require_work(work)
    asked = job.asked()
    chosen = find_cluster(cluster, job.partition)
    request = job_request(chosen.profile, Path(work).stem, asked)
    # The command line takes precedence over the profile.
    in_container = container_options(chosen.profile, start.container, start.container_runtime, start.mounts or [])
    placed = replace(start, launcher=start.launcher or chosen.profile.launcher, **in_container)
    training_request = TrainingRequest(
        work=read_work(work, training, arguments or []),
        backend=training.backend,
        framework=training.framework,
        host_options=host_options(chosen.profile, hosts.fabric, hosts.node, hosts.interface),
        start=Start(**placed.changes()),
        stop=Stop(restarts=restarts),
        dry_run=dry_run,
    )
    order = Order(
        cluster=chosen,
        request=request,
        training=training_request,
        options={*_given({**vars(job), **vars(start), **vars(hosts), **vars(script)}), *_given({"wait": wait or None})},
        image=start.container,
        run_dir=run_dir,
        **vars(script),
    )
    where = scheduler(order.cluster.profile.scheduled_by)
    if dry_run:
        answer(where.describe(order, tell), end="")
        return
    submitted = where.submit(order, tell)
    answer(submitted.directory)
    answer(" ".join(submitted.jobs))
    tell(submitted.advice)
    if wait:
        raise typer.Exit(_wait(RunDirectory(submitted.directory)))


def _given(values: Mapping[str, object]) -> set[str]:
    """The options that were used, as they are written."""
    names = {"further": "sbatch", "mounts": "mount", "environment": "env"}
    return {
        f"--{names.get(name, name).replace('_', '-')}" for name, value in values.items() if value not in (None, False)
    }


def _wait(directory: RunDirectory) -> int:
    from hpctrain.cli.run_output import print_metrics
    from hpctrain.control.supervision.audience import Audience
    from hpctrain.control.supervision.follow import Follower
    from hpctrain.report.console import Console
    from hpctrain.report.page import read_summary

    try:
        with Console() as console:
            audience = Audience(show=console.show, output=console.output)
            wait_for_end(directory, Follower(directory, audience), tell)
    except KeyboardInterrupt:
        place = shell_word(directory.path)
        tell(f"the job continues. See its state: hpctrain status {place}")
        tell(f"  follow it: hpctrain logs -f {place}; end it: hpctrain cancel {place}")
        return _INTERRUPTED
    status = summary_status(directory)
    if status == "done":
        print_metrics(read_model(directory.plan, Plan), read_summary(directory))
        tell(f"report: hpctrain report {shell_word(directory.path)}")
    else:
        words = last_words(directory)
        tell(f"hpctrain: not finished; what the jobs printed is in {directory.logs}{f': {words}' if words else ''}")
        if may_go_on(status, words):
            tell(f"  to resume: {resume_command(directory)}")
    return exit_code(status)


def job(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of job.sh and job.json.")],
    told: Annotated[str | None, typer.Argument(metavar="SIGNAL", help="The signal that came before.")] = None,
) -> None:
    """Do in a job of Slurm what its script leaves to hpctrain."""
    from hpctrain.control.schedulers.slurm.batch import run_batch

    raise typer.Exit(run_batch(directory, told, tell))

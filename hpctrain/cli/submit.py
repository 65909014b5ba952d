"""``hpctrain submit``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli import completion
from hpctrain.cli.host_options import JobHosts
from hpctrain.cli.jobs import order_job
from hpctrain.cli.option_groups import with_groups
from hpctrain.cli.run_options import JobStart, Restarts, WorkOptions
from hpctrain.cli.submit_options import Cluster, JobOptions, ListClusters, ScriptOptions
from hpctrain.cli.work import read_tasks, require_work
from hpctrain.common.run.plan import Start, Stop
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.schedulers.order import container_options, find_cluster, host_options, requested
from hpctrain.control.schedulers.request import require_options
from hpctrain.control.schedulers.scheduler import Order


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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print script, placement and environment; submit and write nothing.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end, and exit as it does.")] = False,
) -> None:
    """Submit a training run to Slurm, or to Kubernetes if the profile is for it. Its jobs continue until it is done.

    Prints the run directory and the job IDs.
    """
    require_work(work)
    asked = job.asked()
    require_options(asked)
    found = find_cluster(cluster, job.partition)
    request = requested(found, Path(work).stem, asked)
    # The command line takes precedence over the profile.
    in_container = container_options(found.profile, start.container, start.container_runtime, start.mounts or [])
    placed = replace(start, launcher=start.launcher or found.profile.launcher, **in_container)
    works = read_tasks(work, training, arguments or [], request.tasks)
    training_request = TrainingRequest(
        work=None,
        backend=training.backend,
        framework=training.framework,
        host_options=host_options(found.profile, hosts.fabric, hosts.node, hosts.interface, hosts.topology),
        start=Start(**placed.changes()),
        stop=Stop(restarts=restarts),
        dry_run=dry_run,
    )
    order = Order(
        cluster=found,
        request=request,
        trainings={task: replace(training_request, work=each) for task, each in works.items()},
        content=script.content(),
        options={
            *_given({**vars(job), **vars(start), **vars(hosts), **vars(script)}),
            *_given({"wait": wait or None}),
        },
        image=start.container,
        run_dir=run_dir,
    )
    order_job(order, dry_run=dry_run, wait=wait)


def _given(values: Mapping[str, object]) -> set[str]:
    """The options that were used, as they are written."""
    names = {"further": "sbatch", "mounts": "mount", "environment": "env"}
    return {
        f"--{names.get(name, name).replace('_', '-')}" for name, value in values.items() if value not in (None, False)
    }

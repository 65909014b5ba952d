"""Where ``data shard`` and ``data prepare-text`` make shards: on ranks of hosts, in a job, or by Spark."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.cli import completion
from hpctrain.cli.host_options import HostNames
from hpctrain.common.errors import HpctrainError

if TYPE_CHECKING:
    from hpctrain.common.shards.work import Manifest, Work

_JOB = "As a job of Slurm"
# The job's.
_NAME = "shards"


class Engine(StrEnum):
    """The programs that divide the work."""

    ranks = "ranks"
    spark = "spark"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Who makes the shards."""

    engine: Annotated[Engine, typer.Option(help="Ranks of MPI, or a job of Spark.")] = Engine.ranks
    master: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Of Spark: spark://HOST:PORT, yarn, local[*]; by default as configured."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ShardJob:
    """A job of Slurm that makes shards; there is one if a cluster is named."""

    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE|auto",
            help="Submit a job to this cluster; auto discovers the cluster at hand.",
            autocompletion=completion.clusters,
            rich_help_panel=_JOB,
        ),
    ] = None
    nodes: Annotated[int | None, typer.Option(metavar="N", help="Nodes; by default 1.", rich_help_panel=_JOB)] = None
    tasks_per_node: Annotated[
        int | None, typer.Option(metavar="T", help="Ranks on each node; by default one per core.", rich_help_panel=_JOB)
    ] = None
    time: Annotated[str | None, typer.Option(metavar="[D-]H:M:S", help="Time limit.", rich_help_panel=_JOB)] = None
    partition: Annotated[str | None, typer.Option(rich_help_panel=_JOB)] = None
    account: Annotated[str | None, typer.Option(rich_help_panel=_JOB)] = None
    further: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="KEY=VALUE", help="Other options of sbatch.", rich_help_panel=_JOB),
    ] = None
    run_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where the job's files go; by default hpctrain-runs/NAME-TIME.", rich_help_panel=_JOB
        ),
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the job; submit and write nothing.", rich_help_panel=_JOB)
    ] = False
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow the job to its end, and exit as it does.", rich_help_panel=_JOB)
    ] = False

    def given(self) -> list[str]:
        """The options that were used."""
        names = [name for name, value in vars(self).items() if value not in (None, False)]
        return [f"--{name.replace('further', 'sbatch').replace('_', '-')}" for name in names]


def wrong_options(problem: str, hint: str = "") -> HpctrainError:
    """The error for options that do not go together, or with what is there."""
    return HpctrainError("HT-data-options", "{problem}", hint, problem=problem)


def make_at(
    work: Work, ranks: int | None, hosts: HostNames, engine: EngineOptions, job: ShardJob, *, as_json: bool
) -> Manifest | None:
    """The manifest of what was made; None where a job makes it.

    Raises:
        HpctrainError: an option is for another way of making shards, or they cannot be made.
    """
    from hpctrain.common.run.plan import HostOptions
    from hpctrain.control.programs.shard import on_ranks

    named = [*(["-np"] if ranks is not None else []), *(["--hosts"] if hosts.given() else [])]
    if engine.engine is Engine.spark:
        from hpctrain.control.programs.spark import on_spark

        if others := [*named, *job.given()]:
            problem = f"--engine spark has executors, and {', '.join(others)} is for other processes"
            raise wrong_options(problem, "Spark's configuration sets the number and size of the executors")
        return on_spark(work, engine.master)
    if engine.master is not None:
        raise wrong_options("--master is for a Spark cluster", "--engine spark uses it")
    if job.cluster is None:
        if given := job.given():
            raise wrong_options(f"{given[0]} is for a Slurm job", "--cluster NAME submits one")
        return on_ranks(work, ranks, HostOptions(**hosts.given()))
    if named:
        hint = "--nodes N --tasks-per-node T instead of -np and hosts"
        raise wrong_options("the ranks of a job are those of its nodes", hint)
    if as_json:
        hint = "leave --json out; the job writes DIR/manifest.json"
        raise wrong_options("--json prints what was made, and a job makes it later", hint)
    _submit(work, job, job.cluster)
    return None


def _submit(work: Work, job: ShardJob, cluster: str) -> None:
    """Submit a job that makes the shards, or print it.

    Raises:
        HpctrainError: the cluster or an option is not available, a package is missing, or sbatch refuses the job.
    """
    from hpctrain.cli.jobs import order_job
    from hpctrain.common.run.request import TrainingRequest
    from hpctrain.control.programs.shard import START, require_extras, shard_script
    from hpctrain.control.schedulers.order import find_cluster, host_options, requested
    from hpctrain.control.schedulers.request import further_options
    from hpctrain.control.schedulers.scheduler import Order

    found = find_cluster(cluster, job.partition)
    if not job.dry_run:
        require_extras(work)
    asked = {
        "nodes": job.nodes,
        # Images are decoded on CPUs.
        "gpus_per_node": 0,
        "tasks_per_node": job.tasks_per_node or found.profile.node.cores,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "sbatch": further_options(job.further or []),
    }
    request = requested(found, _NAME, asked)
    training = TrainingRequest(
        work=shard_script(work),
        backend="mpi",
        host_options=host_options(found.profile, None, None, None),
        start=START,
        dry_run=job.dry_run,
    )
    order = Order(
        cluster=found,
        request=request,
        trainings={None: training},
        options={"data --cluster"},
        run_dir=job.run_dir,
        title=_NAME,
    )
    order_job(order, dry_run=job.dry_run, wait=job.wait)

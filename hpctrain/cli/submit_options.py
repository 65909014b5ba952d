"""Options of ``submit`` that are Slurm's or about its job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hpctrain.cli import completion
from hpctrain.common.settings import STAGE
from hpctrain.control.schedulers.request import further_options
from hpctrain.control.schedulers.scheduler import ScriptContent
from hpctrain.report.output import answer


def _print_variables(wanted: bool) -> None:
    if wanted:
        from hpctrain.control.schedulers.slurm.script import list_variables

        answer(list_variables())
        raise typer.Exit


def _print_clusters(wanted: bool) -> None:
    if wanted:
        from hpctrain.control.schedulers.profiles import describe_profiles

        for line in describe_profiles():
            tried = "" if line.tried else " (hpctrain was not run there)"
            answer(f"{line.name}: {line.remark}{tried}\n  {line.source}")
        raise typer.Exit


_SLURM = "What is requested from Slurm"
_SCRIPT = "The job script"

Cluster = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE|auto",
        help="A cluster profile; auto discovers the cluster at hand.",
        autocompletion=completion.clusters,
    ),
]
ListClusters = Annotated[
    bool,
    typer.Option("--list-clusters", callback=_print_clusters, is_eager=True, help="Print the shipped profiles."),
]


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Requests to Slurm; None leaves a value to the profile."""

    nodes: Annotated[int | None, typer.Option(metavar="N", help="Nodes; by default 1.", rich_help_panel=_SLURM)] = None
    gpus_per_node: Annotated[
        int | None, typer.Option(metavar="G", help="GPUs of each node; by default all.", rich_help_panel=_SLURM)
    ] = None
    tasks_per_node: Annotated[
        int | None,
        typer.Option(metavar="T", help="Ranks on each node; by default one per GPU.", rich_help_panel=_SLURM),
    ] = None
    cpus_per_task: Annotated[
        int | None,
        typer.Option(metavar="C", help="CPUs of each rank; by default its share of the cores.", rich_help_panel=_SLURM),
    ] = None
    time: Annotated[
        str | None, typer.Option(metavar="[D-]H:M:S", help="Time limit of a job.", rich_help_panel=_SLURM)
    ] = None
    partition: Annotated[str | None, typer.Option("--partition", "-p", rich_help_panel=_SLURM)] = None
    account: Annotated[str | None, typer.Option(rich_help_panel=_SLURM)] = None
    qos: Annotated[str | None, typer.Option(rich_help_panel=_SLURM)] = None
    constraint: Annotated[
        str | None, typer.Option(help="Features that the nodes must have.", rich_help_panel=_SLURM)
    ] = None
    job_name: Annotated[
        str | None, typer.Option(help="Name of the job; by default the recipe's or script's.", rich_help_panel=_SLURM)
    ] = None
    array: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="One training run per task, as 0-9 or 0-9%2 (two at a time); %a in --set and arguments is its number.",
            rich_help_panel=_SLURM,
        ),
    ] = None
    dependency: Annotated[str | None, typer.Option(metavar="afterok:ID", rich_help_panel=_SLURM)] = None
    chain: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Number of jobs, each resuming where the last one stopped.", rich_help_panel=_SLURM
        ),
    ] = None
    further: Annotated[
        list[str] | None,
        typer.Option(
            "--sbatch", metavar="KEY=VALUE", help="Other options of sbatch; repeatable.", rich_help_panel=_SLURM
        ),
    ] = None

    def asked(self) -> dict[str, Any]:
        """The fields of :class:`~hpctrain.control.schedulers.request.JobRequest`; None for an option not given."""
        options = dict(vars(self))
        return {"name": options.pop("job_name"), "sbatch": further_options(options.pop("further") or []), **options}


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """The options about the job script."""

    stage: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="SOURCE",
            help=f"Copy to each node, unpacking archives; a script finds it in ${STAGE.name}; repeatable.",
            rich_help_panel=_SCRIPT,
        ),
    ] = None
    stage_environment: Annotated[
        Path | None,
        typer.Option(
            metavar="SOURCE",
            help="The ranks' virtual environment, a folder or an archive, copied to each node.",
            rich_help_panel=_SCRIPT,
        ),
    ] = None
    pack: Annotated[
        bool,
        typer.Option(
            "--pack",
            help="Send this environment to each node as one archive, and start from the node's disk.",
            rich_help_panel=_SCRIPT,
        ),
    ] = False
    template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Your own Jinja template for the job script.", rich_help_panel=_SCRIPT),
    ] = None
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Verify for a few steps first, on the job's nodes; a job whose ranks differ from one process ends.",
            rich_help_panel=_SCRIPT,
        ),
    ] = False
    list_variables: Annotated[
        bool,
        typer.Option(
            "--list-variables",
            callback=_print_variables,
            is_eager=True,
            help="Print the variables of a template.",
            rich_help_panel=_SCRIPT,
        ),
    ] = False

    def content(self) -> ScriptContent:
        """What the job script does."""
        return ScriptContent(
            stage=self.stage or (),
            stage_environment=self.stage_environment,
            pack=self.pack,
            template=self.template,
            verify=self.verify,
        )

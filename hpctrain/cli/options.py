"""Options that several commands share: ``Annotated`` types, and dataclasses of them that a command takes at once."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command for Typer: each parameter whose type is a dataclass is replaced by the dataclass's fields.

    Every field has a default and is annotated like an option. Help lists the fields in the place of the parameter,
    under the title ``panel`` of the dataclass where it has one.
    """
    types = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in types.items() if is_dataclass(kind)}

    def parameters() -> Iterator[inspect.Parameter]:
        for parameter in inspect.signature(command).parameters.values():
            if group := groups.get(parameter.name):
                kinds = get_type_hints(group, include_extras=True)
                for field in fields(group):
                    kind = _under(getattr(group, "panel", None), kinds[field.name])
                    yield _parameter(field.name, field.default, kind)
            else:
                yield _parameter(parameter.name, parameter.default, types[parameter.name])

    @functools.wraps(command)
    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    vars(call)["__signature__"] = inspect.Signature([*parameters()])
    return call


def _under(panel: str | None, kind: Any) -> Any:
    value, option = get_args(kind)[:2]
    option = copy.copy(option)
    option.rich_help_panel = panel
    return Annotated[value, option]


def _parameter(name: str, default: Any, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def given(**options: Any) -> dict[str, Any]:
    """The options that were given on the command line, which are not None."""
    return {name: value for name, value in options.items() if value is not None}


RecipeOrScript = Annotated[
    str | None,
    typer.Argument(metavar="[RECIPE|SCRIPT.py]", help="A recipe's name or file, or a script."),
]
RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name or file.")]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="Arguments of the script.")]
Oversubscribe = Annotated[bool, typer.Option("--oversubscribe", help="Allow more ranks than this machine has cores.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Target = Annotated[
    str,
    typer.Argument(
        metavar="[RUN_DIR|JOBID|last]",
        help="A run's directory, or a job: 12, or 12_3; by default the last run in hpctrain-runs/.",
        show_default=False,
    ),
]

FabricFile = Annotated[
    Path | None,
    typer.Option("--fabric", metavar="FILE", help="Fabric file for the order of the hosts, as for `topology show`."),
]
Routes = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Forwarding tables: a folder of ibroute's output, or dump_lfts's.")
]
NodeFile = Annotated[
    str | None,
    typer.Option(
        "--node",
        metavar="FILE|live",
        help="GPUs, adapters and cores of each host: from nvidia-smi topo -m, lstopo --of xml or NCCL; or those of "
        "this machine.",
    ),
]
Interface = Annotated[
    str | None, typer.Option(metavar="NAME", help="Network interface for connections that are not InfiniBand.")
]


@dataclass(frozen=True, kw_only=True)
class HostNames:
    """The hosts of a run and their network."""

    hosts: Annotated[
        str | None,
        typer.Option("--hosts", "-H", metavar="LIST", help="The hosts: gpu[001-032],gpu040, or with slots: n1:8,n2:8."),
    ] = None
    hostfile: Annotated[
        Path | None, typer.Option("--hostfile", metavar="FILE", help="Hostfile of Open MPI, Hydra or Slurm.")
    ] = None
    interface: Interface = None

    def given(self) -> dict[str, Any]:
        """The fields of :class:`hpctrain.common.run.plan.HostOptions` that were given."""
        return given(**vars(self))


@dataclass(frozen=True, kw_only=True)
class Switches:
    """The switches between hosts."""

    fabric: FabricFile = None
    routes: Routes = None


@dataclass(frozen=True, kw_only=True)
class NamedHosts(Switches, HostNames):
    """Hosts and their network, with the switches between them."""


@dataclass(frozen=True, kw_only=True)
class HostsWithSlots(NamedHosts):
    """Hosts, network and switches, with the GPUs, adapters and cores of each host."""

    node: NodeFile = None

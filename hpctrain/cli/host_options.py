"""Options about hosts that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hpctrain.cli.option_groups import given

FabricFile = Annotated[
    Path | None,
    typer.Option("--fabric", metavar="FILE", help="Fabric file for the order of the hosts, as for `topology show`."),
]
TopologyName = Annotated[
    str | None,
    typer.Option(
        "--topology",
        metavar="NAME",
        help="Which topology of Slurm's file to take; by default the one that has the hosts, else the default one.",
    ),
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
        Path | None,
        typer.Option("--hostfile", metavar="FILE", help="Hostfile of Open MPI, Hydra or Slurm."),
    ] = None
    interface: Interface = None

    def given(self) -> dict[str, Any]:
        """The fields of :class:`hpctrain.common.run.plan.HostOptions` that were given."""
        return given(**vars(self))


@dataclass(frozen=True, kw_only=True)
class Switches:
    """The switches between hosts."""

    fabric: FabricFile = None
    routes: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Forwarding tables: a folder of ibroute's output, or dump_lfts's."),
    ] = None
    topology: TopologyName = None


@dataclass(frozen=True, kw_only=True)
class NamedHosts(Switches, HostNames):
    """Hosts and their network, with the switches between them."""


@dataclass(frozen=True, kw_only=True)
class HostsWithSlots(NamedHosts):
    """Hosts, network and switches, with the GPUs, adapters and cores of each host."""

    node: NodeFile = None


@dataclass(frozen=True, kw_only=True)
class JobHosts:
    """What is known of a job's hosts before it starts."""

    fabric: FabricFile = None
    topology: TopologyName = None
    node: NodeFile = None
    interface: Interface = None
